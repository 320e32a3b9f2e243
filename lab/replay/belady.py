"""MIN (Belady 1966) with bypass: what a cache that knew the future would hit: the bound of all policies.

The victim is the block whose next use lies furthest ahead, counted in requests; among those of one request the deepest,
as it is of no use without the others. A block that would itself be the victim isn't taken in at all.

All blocks are in a heap, each with its next use when it was put there; what has been used since is skipped when it
comes to the top. O(log n) a block.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from lab.replay.hits import HitCounter, HitRates
from lab.traces import Request

_NEVER = 1 << 62


def replay_min(requests: Sequence[Request], *, capacity_blocks: int) -> HitRates:
    """Count as ``replay`` does, with the best choice at every block."""
    next_uses = _next_uses(requests)
    resident: dict[int, tuple[int, int]] = {}
    heap: list[tuple[int, int, int]] = []
    counter = HitCounter()
    for request, uses in zip(requests, next_uses, strict=True):
        counter.add(request, resident)
        ids = request.block_ids
        for depth in range(len(ids) - 1, -1, -1):
            block, use = ids[depth], uses[depth]
            if block not in resident and len(resident) >= capacity_blocks:
                if use == _NEVER:
                    continue
                while resident.get(-heap[0][2]) != (-heap[0][0], -heap[0][1]):
                    heappop(heap)
                if (use, depth) >= (-heap[0][0], -heap[0][1]):
                    continue
                del resident[-heappop(heap)[2]]
            resident[block] = (use, depth)
            heappush(heap, (-use, -depth, -block))
    return counter.rates()


def _next_uses(requests: Sequence[Request]) -> list[list[int]]:
    """Return, for each block of each request, the number of the next request that has it."""
    following: dict[int, int] = {}
    found: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        ids = requests[number].block_ids
        found.append([following.get(block, _NEVER) for block in ids])
        for block in ids:
            following[block] = number
    return found[::-1]
