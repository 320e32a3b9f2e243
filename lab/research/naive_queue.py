"""The oracle of the strategies: it remembers everything that happened and works each order out anew.

Each order is said a second time here, as it would be on paper, over a log of events; nothing is kept between two looks.
O(events * requests) a look: for tests, never for an engine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvcontrol.scheduler_ir.strategies.base import EngineView, WaitingId, WaitingRequest
from kvcontrol.scheduler_ir.strategies.hybrid import FOLLOWERS, RECENT_PREFIXES

_NOTHING_KNOWN: Final = EngineView()

Key = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """One call: what came, left or started, and when (starts alone have a time)."""

    kind: Literal["add", "remove", "start"]
    request: WaitingRequest
    now_s: float = 0.0


class NaiveQueue:
    """A ``WaitingQueue`` whose order is ``name``'s, with that strategy's default parameters but for the bound."""

    def __init__(self, order: str, *, ageing_bound_s: float) -> None:
        self._order = order
        self._bound_s = ageing_bound_s
        self._log: list[Event] = []
        self._promotions = 0

    @property
    def name(self) -> str:
        return self._order

    @property
    def ageing_bound_s(self) -> float:
        return self._bound_s

    @property
    def promotions(self) -> int:
        return self._promotions

    @property
    def oldest_s(self) -> float | None:
        return min((request.arrived_s for request in self), default=None)

    @property
    def state(self) -> str:
        return _followed(self._log) if self._order == "adaptive" else ""

    def add(self, request: WaitingRequest) -> None:
        if request.request_id in self:
            raise ValueError(f"request {request.request_id} waits already")
        self._log.append(Event("add", request))

    def remove(self, request_id: WaitingId) -> WaitingRequest:
        request = self._of(request_id)
        self._log.append(Event("remove", request))
        return request

    def start(self, request_id: WaitingId, now_s: float) -> WaitingRequest:
        request = self._of(request_id)
        self._promotions += request.arrived_s <= now_s - self._bound_s
        self._log.append(Event("start", request, now_s))
        return request

    def take(self, most: int, now_s: float, view: EngineView = _NOTHING_KNOWN) -> list[WaitingRequest]:
        chosen = self.peek(most, now_s, view)
        for request in chosen:
            self.start(request.request_id, now_s)
        return chosen

    def peek(self, most: int, now_s: float, view: EngineView = _NOTHING_KNOWN) -> list[WaitingRequest]:
        keys = _keys(self._order, self._log, now_s, view)
        numbers = _numbers(self._log)

        def place(request: WaitingRequest) -> tuple[Key, float, int]:
            aged = request.arrived_s <= now_s - self._bound_s
            key: Key = (0.0,) if aged else (1.0, *keys[request.request_id])
            return key, request.arrived_s, numbers[request.request_id]

        return sorted(self, key=place)[: max(0, most)]

    def __len__(self) -> int:
        return len(_waiting(self._log))

    def __iter__(self) -> Iterator[WaitingRequest]:
        return iter(_waiting(self._log))

    def __contains__(self, request_id: object) -> bool:
        return any(request.request_id == request_id for request in self)

    def check_integrity(self) -> None:
        """Nothing is kept that could contradict itself."""

    def _of(self, request_id: WaitingId) -> WaitingRequest:
        for request in self:
            if request.request_id == request_id:
                return request
        raise KeyError(request_id)


def _numbers(log: Sequence[Event]) -> dict[WaitingId, int]:
    """Return when each request that waits came, in calls."""
    numbers: dict[WaitingId, int] = {}
    for number, event in enumerate(log):
        if event.kind == "add":
            numbers[event.request.request_id] = number
        else:
            del numbers[event.request.request_id]
    return numbers


def _waiting(log: Sequence[Event]) -> list[WaitingRequest]:
    return [log[number].request for number in _numbers(log).values()]


def _keys(order: str, log: Sequence[Event], now_s: float, view: EngineView) -> dict[WaitingId, Key]:
    """Return what each request that waits is sorted by, before its arrival."""
    waiting = _waiting(log)
    match order:
        case "fifo":
            return {each.request_id: () for each in waiting}
        case "priority":
            return {each.request_id: (-each.priority, each.arrived_s + each.prefill_tokens / 4000) for each in waiting}
        case "slo_aware":
            return {each.request_id: _deadline_key(each, now_s, view) for each in waiting}
        case "aegaeon":
            return _groups(log)
        case "hybrid":
            return _due(log)
        case _:
            return _keys(_followed(log).partition(": ")[2], log, now_s, view)


def _deadline_key(request: WaitingRequest, now_s: float, view: EngineView) -> Key:
    if request.deadline_s is None:
        return (0.0, request.arrived_s + 10.0)
    needed_s = request.prefill_tokens / view.prefill_tokens_per_s if view.prefill_tokens_per_s > 0 else 0.0
    return (1.0,) if request.deadline_s <= now_s + needed_s else (0.0, request.deadline_s)


def _groups(log: Sequence[Event]) -> dict[WaitingId, Key]:
    groups: list[list[int]] = []  # of the numbers of those that joined
    for number, event in enumerate(log):
        if event.kind != "add":
            continue
        still = set(_numbers(log[:number]).values())
        same = [group for group in groups if _kind(log[group[0]]) == _kind(event)]
        if not same or len(same[-1]) >= 8 or not still & set(same[-1]):  # noqa: PLR2004
            groups.append([])
            same.append(groups[-1])
        same[-1].append(number)
    place = {number: float(place) for place, group in enumerate(groups) for number in group}
    return {request_id: (place[number],) for request_id, number in _numbers(log).items()}


def _kind(event: Event) -> tuple[str, int]:
    return event.request.model, event.request.prefix


def _due(log: Sequence[Event]) -> dict[WaitingId, Key]:
    gained: set[WaitingId] = set()
    recent: list[int] = []
    for number, event in enumerate(log):
        prefix = event.request.prefix
        if event.kind == "add":
            gained.discard(event.request.request_id)
            if prefix in recent:
                gained.add(event.request.request_id)
        elif event.kind == "start" and prefix:
            recent = [*(each for each in recent if each != prefix), prefix][-RECENT_PREFIXES:]
            waiting = _waiting(log[: number + 1])
            apart = [each for each in waiting if each.prefix == prefix and each.request_id not in gained]
            gained.update(each.request_id for each in apart[:FOLLOWERS])
    keys: dict[WaitingId, Key] = {}
    for each in _waiting(log):
        due_s = each.arrived_s + 10.0 if each.deadline_s is None else min(each.deadline_s, each.arrived_s + 10.0)
        due_s -= 10.0 * each.priority
        keys[each.request_id] = (due_s - 2.0 if each.request_id in gained else due_s,)
    return keys


def _followed(log: Sequence[Event]) -> str:
    state, judged_s, last_s, gap_s, missed = "calm: priority", None, None, 0.0, 0.0
    for number, event in enumerate(log):
        if event.kind != "start":
            continue
        now_s, waiting = event.now_s, _waiting(log[: number + 1])
        if last_s is not None and waiting:
            gap_s += (now_s - last_s - gap_s) / 8
        last_s = now_s
        if event.request.deadline_s is not None:
            missed += ((event.request.deadline_s < now_s) - missed) / 8
        if judged_s is not None and now_s - judged_s < 2.0:  # noqa: PLR2004
            continue
        judged_s = now_s
        coming = [each.deadline_s for each in waiting if each.deadline_s is not None and each.deadline_s > now_s]
        if missed > 0.5:  # noqa: PLR2004
            state = "drowning: hybrid"
        elif coming and now_s + len(waiting) * gap_s >= min(coming):
            state = "pressed: slo_aware"
        else:
            state = "calm: priority"
    return state
