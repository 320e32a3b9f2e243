"""The contiguous layout that blocks replaced: one run of token slots a request, reserved for the longest it may get.

Kept as a baseline: simple kernels and no tables, but what is reserved and never written is lost (internal
fragmentation), and so are holes too small for the next reservation (external). Places are found first-fit.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

from kvcontrol.core.integrity import must
from kvcontrol.kv_runtime.errors import RequestError
from kvcontrol.kv_runtime.refusal import NoSpace, Shortage
from lab.research.pool.usage import Fragmentation


@dataclass(slots=True)
class _Slot:
    start: int
    reserved: int
    tokens: int


class SlotLayout:
    """Runs in ``range(capacity_tokens)``. Misuse raises ``RequestError``; every call is O(holes)."""

    def __init__(self, capacity_tokens: int) -> None:
        if capacity_tokens <= 0:
            raise RequestError(f"a layout for {capacity_tokens} tokens; it needs at least 1")
        self.capacity_tokens = capacity_tokens
        self.reserved_tokens = 0
        self.written_tokens = 0
        self._holes: list[tuple[int, int]] = [(0, capacity_tokens)]
        """Start and length of what is free, in order, never two that touch."""
        self._slots: dict[str, _Slot] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def allocate(self, request_id: str, tokens: int, *, reserve: int) -> int | NoSpace:
        """Reserve room for ``reserve`` tokens, of which ``tokens`` are written now; return where it begins."""
        if request_id in self._slots:
            raise RequestError(f"request {request_id} has a slot already")
        if not 1 <= tokens <= reserve:
            raise RequestError(f"request {request_id} of {tokens} tokens in a slot of {reserve}")
        for place, (start, length) in enumerate(self._holes):
            if length >= reserve:
                self._holes[place : place + 1] = [(start + reserve, length - reserve)] if length > reserve else []
                self._slots[request_id] = _Slot(start, reserve, tokens)
                self.reserved_tokens += reserve
                self.written_tokens += tokens
                return start
        free = self.capacity_tokens - self.reserved_tokens
        shortage = Shortage.FRAGMENTED if reserve <= free else Shortage.FULL
        return NoSpace(wanted=1, available=0, shortage=shortage)

    def append(self, request_id: str, tokens: int = 1) -> None:
        """Write further tokens; ``RequestError`` beyond the reservation, which can't grow."""
        slot = self._get(request_id)
        if not 1 <= tokens <= slot.reserved - slot.tokens:
            raise RequestError(f"{tokens} tokens appended to request {request_id}: {slot.tokens} of {slot.reserved}")
        slot.tokens += tokens
        self.written_tokens += tokens

    def free(self, request_id: str) -> None:
        """Give a slot back, joined with the holes beside it."""
        slot = self._get(request_id)
        del self._slots[request_id]
        self.reserved_tokens -= slot.reserved
        self.written_tokens -= slot.tokens
        start, length = slot.start, slot.reserved
        place = bisect_left(self._holes, (start, length))
        if place < len(self._holes) and self._holes[place][0] == start + length:
            length += self._holes.pop(place)[1]
        if place and sum(self._holes[place - 1]) == start:
            before, more = self._holes.pop(place - 1)
            start, length = before, length + more
        insort(self._holes, (start, length))

    def get_fragmentation(self) -> Fragmentation:
        """Internal: of the reserved tokens, the share not written. External: of the free ones, the share outside of
        the largest hole.
        """
        free = self.capacity_tokens - self.reserved_tokens
        largest = max((length for _, length in self._holes), default=0)
        return Fragmentation(
            internal_ratio=1 - self.written_tokens / self.reserved_tokens if self.reserved_tokens else 0.0,
            external_ratio=1 - largest / free if free else 0.0,
        )

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the parts contradict each other."""
        parts = sorted([*self._holes, *((slot.start, slot.reserved) for slot in self._slots.values())])
        end = 0
        for start, length in parts:
            must(start == end and length > 0, f"a gap, an overlap or nothing at token {start}")
            end = start + length
        must(end == self.capacity_tokens, "tokens are lost at the end")
        ends = {start + length for start, length in self._holes}
        must(not any(start in ends for start, _ in self._holes), "two holes touch")
        must(self.reserved_tokens == sum(slot.reserved for slot in self._slots.values()), "reserved_tokens is wrong")
        must(self.written_tokens == sum(slot.tokens for slot in self._slots.values()), "written_tokens is wrong")

    def _get(self, request_id: str) -> _Slot:
        slot = self._slots.get(request_id)
        if slot is None:
            raise RequestError(f"request {request_id} has no slot (freed already, or never allocated)")
        return slot
