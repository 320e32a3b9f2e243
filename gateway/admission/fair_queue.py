"""A bounded queue with priority classes, ageing, and fair shares between tenants.

Between tenants of one class the one that has got least goes first, as in "Fairness in Serving Large Language Models"
(VTC, Sheng et al., 2024): each tenant has a counter of the work that it was given, divided by its weight. Work is
charged when a request is let in, as far as it is known, and corrected when it ends. A tenant that comes back after a
pause starts at the least counter of those that wait, so that nobody saves up a claim.

A request rises by one class for every ``ageing_s`` that it has waited, so no class waits for ever: among requests that
have all risen to the top, the tenant that has got least goes first.

When the queue is full, what has the least claim to its place leaves: the newest request of the tenant that has most of
them waiting in the lowest class. Rejected: refusing whoever comes last, which lets one tenant fill the queue and keep
everybody else out.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from gateway.types import TenantId
from kvcontrol.core.priority import Priority

Claim = int
"""What a request is let in as: 0, one that is of the highest class or has risen to it by waiting; 1, one that is or has
become an ordinary one; or 2, one of the lowest.
"""

_LEVELS: Final[dict[Priority, Claim]] = {Priority.HIGH: 0, Priority.NORMAL: 1, Priority.LOW: 2}
_CLASSES: Final = tuple(_LEVELS)
_ANY: Final = (True, True, True)
_MOST_COUNTERS: Final = 10_000


@dataclass(slots=True, eq=False, kw_only=True)
class Waiting:
    """One request in the queue. ``work`` is what it is expected to cost, in tokens, ``places`` how many sequences an
    engine runs for it; ``granted`` is set by who gave it its turn, ``claim`` when it is taken out for that.
    """

    tenant: TenantId
    weight: float
    priority: Priority
    work: float
    arrived_s: float
    places: int = field(default=1)
    number: int = field(default=0)
    granted: bool = field(default=False)
    claim: Claim = field(default=2)


class FairQueue:
    """Decides, waits for nothing. ``pop`` and ``push`` are O(tenants that wait), ``remove`` O(requests of a tenant)."""

    def __init__(self, *, bound: int, ageing_s: float) -> None:
        self._bound = bound
        self._ageing_s = ageing_s
        self._lines: dict[tuple[TenantId, Priority], deque[Waiting]] = {}
        self._counters: dict[TenantId, float] = {}
        self._last = 0.0  # the least counter that was let in last: where a tenant starts when nobody waits
        self._size = 0
        self._number = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Waiting]:
        for line in self._lines.values():
            yield from line

    def push(self, request: Waiting) -> Waiting | None:
        """Queue a request; return the one that has to leave for it (maybe itself), None when there was room."""
        if not self._waits(request.tenant):
            self._lift(request.tenant)
        loser = None
        if self._size >= self._bound:
            loser = self._least_claim(request)
            if loser is request:
                return request
            self.remove(loser)
        self._number += 1
        request.number = self._number
        self._lines.setdefault((request.tenant, request.priority), deque()).append(request)
        self._size += 1
        return loser

    def pop(self, now_s: float, has_slot: Sequence[bool] = _ANY) -> Waiting | None:
        """Take the next request out and charge its tenant, among those for whose claim there is room; None when
        there are none.
        """
        best: Waiting | None = None
        best_rank: tuple[int, float, int] | None = None
        counters, ageing_s = self._counters, self._ageing_s
        for line in self._lines.values():
            head = line[0]
            level = max(0, _LEVELS[head.priority] - int((now_s - head.arrived_s) / ageing_s))
            if not has_slot[level]:
                continue
            rank = (level, counters[head.tenant], head.number)
            if best_rank is None or rank < best_rank:
                best, best_rank = head, rank
        if best is None or best_rank is None:
            return None
        best.claim = best_rank[0]
        self.remove(best)
        self.let_in(best.tenant, best.weight, best.work)
        return best

    def remove(self, request: Waiting) -> None:
        """Take a request out that leaves without having been let in; it must be there."""
        key = (request.tenant, request.priority)
        line = self._lines[key]
        if line[0] is request:
            line.popleft()
        else:
            line.remove(request)
        if not line:
            del self._lines[key]
        self._size -= 1

    def let_in(self, tenant: TenantId, weight: float, work: float) -> None:
        """Charge a tenant for a request that goes on now, from the queue or past it."""
        if tenant not in self._counters:
            self._lift(tenant)
        self._last = max(self._last, self._counters[tenant]) if not self._size else self._last
        self._counters[tenant] += work / weight

    def correct(self, tenant: TenantId, weight: float, by: float) -> None:
        """Correct a tenant's charge by the request's actual cost."""
        if tenant in self._counters:
            self._counters[tenant] += by / weight

    def counter(self, tenant: TenantId) -> float:
        """Return the work that a tenant was charged, divided by its weight, since the counters began."""
        return self._counters.get(tenant, 0.0)

    def _waits(self, tenant: TenantId) -> bool:
        return any((tenant, priority) in self._lines for priority in Priority)

    def _lift(self, tenant: TenantId) -> None:
        floor = min((self._counters[each] for each, _ in self._lines), default=self._last)
        if tenant not in self._counters and len(self._counters) >= _MOST_COUNTERS:
            self._forget()
        self._counters[tenant] = max(self._counters.get(tenant, 0.0), floor)

    def _forget(self) -> None:
        """Let go the half of the tenants that don't wait and have got least: they lose nothing by it."""
        waiting = {tenant for tenant, _ in self._lines}
        idle = sorted((each for each in self._counters if each not in waiting), key=self._counters.__getitem__)
        for tenant in idle[: max(1, len(idle) // 2)]:
            del self._counters[tenant]

    def _least_claim(self, newcomer: Waiting) -> Waiting:
        """Return the request to shed from a full queue: in the lowest class, the newest of the tenant with most
        requests.
        """
        level = max(_LEVELS[priority] for _, priority in self._lines) if self._lines else -1
        if level < _LEVELS[newcomer.priority]:
            return newcomer
        lines = [line for (_, priority), line in self._lines.items() if _LEVELS[priority] == level]
        longest = max(lines, key=len)
        if level == _LEVELS[newcomer.priority]:
            own = len(self._lines.get((newcomer.tenant, newcomer.priority), ()))
            if own + 1 >= len(longest):
                return newcomer
        return longest[-1]

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the parts contradict each other."""
        lines = self._lines
        problems = [
            *(f"an empty line of {key}" for key, line in lines.items() if not line),
            *(f"no counter of {tenant}" for tenant, _ in lines if tenant not in self._counters),
            *(f"the line of {key} is out of order" for key, line in lines.items() if not _in_order(line)),
        ]
        if self._size != sum(map(len, lines.values())) or self._size > self._bound:
            problems.append(f"a size of {self._size}")
        if problems:
            raise AssertionError("; ".join(problems))


def claim_of(priority: Priority) -> Claim:
    """Return the claim of a request that has just come."""
    return _LEVELS[priority]


def class_of(claim: Claim) -> Priority:
    """Return the class that a request is served as that was let in so."""
    return _CLASSES[claim]


def _in_order(line: deque[Waiting]) -> bool:
    numbers = [each.number for each in line]
    return numbers == sorted(numbers)
