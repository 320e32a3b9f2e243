"""Admission without its event loop: how many requests each instance may have, whose turn it is, and who is refused.

``ConcurrencyLimiter`` and ``FairQueue`` are the gateway's own, asked in ``AdmissionController``'s order. Whether an
instance has room is kept from one request to the next, as only what begins, ends or changes a limit can change it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.admission.fair_queue import FairQueue, Waiting
from gateway.admission.limiter import ConcurrencyLimiter
from gateway.registry import Instance, LoadTracker
from gateway.types import TenantId
from kvcontrol.core.ids import InstanceId
from kvcontrol.core.priority import Priority

_TENANT: Final = TenantId("simulated")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRules:
    """As the gateway's settings: ``bound`` requests may wait, each for ``longest_s``."""

    bound: int = 1024
    longest_s: float = 60.0
    ageing_s: float = 10.0
    most_at_once: int = 4096
    slow_s: float = 60.0


class SimAdmission:
    """See the module's text; O(1) a request where nobody waits and nobody is full."""

    def __init__(
        self, instances: Sequence[Instance], *, load: LoadTracker, rules: AdmissionRules, clock: Callable[[], float]
    ) -> None:
        self.shed = 0
        self._instances = {each.id: each for each in instances}
        self._load = load
        self._rules = rules
        self._clock = clock
        self._limiter = ConcurrencyLimiter(most=rules.most_at_once, slow_s=rules.slow_s, clock=clock)
        self._queue = FairQueue(bound=rules.bound, ageing_s=rules.ageing_s)
        self._waiting: dict[int, object] = {}
        self._expiries: deque[tuple[float, Waiting]] = deque()
        self._full: set[InstanceId] = set()
        self._with_slot: tuple[Instance, ...] | None = None
        self._all = tuple(instances)

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._queue)

    def usable(self) -> tuple[Instance, ...]:
        """Return the instances that have room, all when none has."""
        if self._with_slot is None:
            full = self._full
            self._with_slot = tuple([each for each in self._all if each.id not in full]) or self._all
        return self._with_slot

    def enter(self, request: object, work: float) -> bool:
        """Whether a request may go on at once; else it waits, or is refused where too many do."""
        if not self._queue and len(self._full) < len(self._all):
            self._queue.let_in(_TENANT, 1.0, work)
            return True
        now_s = self._clock()
        waiting = Waiting(tenant=_TENANT, weight=1.0, priority=Priority.NORMAL, work=work, arrived_s=now_s)
        loser = self._queue.push(waiting)
        if loser is not waiting:
            self._waiting[id(waiting)] = request
            self._expiries.append((now_s + self._rules.longest_s, waiting))
        if loser is not None:
            self._waiting.pop(id(loser), None)
            self.shed += 1
        return False

    def next_in(self) -> object | None:
        """Return a request whose turn it is now, None when nobody's is."""
        self._expire()
        if len(self._full) == len(self._all):
            return None
        waiting = self._queue.pop(self._clock())
        return None if waiting is None else self._waiting.pop(id(waiting))

    def placed(self, instance: Instance) -> None:
        """A request counts at an instance from now on, or has left it."""
        in_flight = self._load.in_flight(instance.id)
        is_full = in_flight >= self._limiter.limit(instance)
        if is_full != (instance.id in self._full):
            (self._full.add if is_full else self._full.discard)(instance.id)
            self._with_slot = None

    def answered(self, instance: Instance, *, after_s: float) -> None:
        """An answer began."""
        load = self._load
        self._limiter.answered(
            instance, after_s=after_s, in_flight=load.in_flight(instance.id), answering=load.answering(instance.id)
        )
        self.placed(instance)

    def reported(self, instances: Sequence[Instance]) -> None:
        """Instances have said how they do."""
        changed = [each for each in instances if self._instances[each.id] is not each]
        for each in changed:
            self._instances[each.id] = each
        if changed:
            self._all = tuple(self._instances.values())
            self._with_slot = None
        self._limiter.watch(self._all)
        for each in self._all:
            self.placed(each)

    def _expire(self) -> None:
        """Refuse those that have waited for too long."""
        now_s = self._clock()
        while self._expiries and self._expiries[0][0] <= now_s:
            waiting = self._expiries.popleft()[1]
            if self._waiting.pop(id(waiting), None) is not None:
                self._queue.remove(waiting)
                self.shed += 1
