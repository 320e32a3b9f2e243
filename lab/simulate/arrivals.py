"""When the requests of a workload come: by the trace's times, or from users who wait for their answers."""

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from typing import Final, Protocol

from kvcontrol.core.blocks import CacheIdentity
from lab.simulate.workload import Arrival, Workload

NEVER: Final = float("inf")


class Arrivals(Protocol):
    """The requests that are yet to come, in the order of their times."""

    @property
    def next_s(self) -> float:
        """When the next one comes; infinite while none is known."""
        ...

    def pop(self) -> Arrival:
        """Take the next one; there must be one."""
        ...

    def over(self, arrival: Arrival, now_s: float) -> None:
        """A request was answered, shed or refused."""
        ...


class OpenLoop:
    """Every request comes when the trace has it, however late answers are."""

    def __init__(self, workload: Workload, identity: CacheIdentity) -> None:
        self._rest: Iterator[Arrival] = workload.arrivals(identity)
        self._next = next(self._rest, None)

    @property
    def next_s(self) -> float:
        """See ``Arrivals``."""
        return NEVER if self._next is None else self._next.at_s

    def pop(self) -> Arrival:
        """See ``Arrivals``."""
        found, self._next = self._next, next(self._rest, None)
        assert found is not None  # noqa: S101 - there is one
        return found

    def over(self, arrival: Arrival, now_s: float) -> None:
        """See ``Arrivals``."""


class ClosedLoop:
    """As ``kvgate replay --users``: each user takes one session after another, or one request where there are none, and
    sends the next request once the one before is over. Nobody sends after ``duration_s`` (0: until all are sent).
    """

    def __init__(self, workload: Workload, identity: CacheIdentity, *, users: int, duration_s: float) -> None:
        sessions: dict[tuple[int, str], deque[Arrival]] = {}
        for each in workload.arrivals(identity):
            name = workload.requests[each.number].session or f"\0{each.number}"
            sessions.setdefault((each.copy, name), deque()).append(each)
        self._sessions = deque(sessions.values())
        self._duration_s = duration_s
        self._due: list[tuple[float, int, Arrival]] = []
        self._ticks = count()
        self._own: dict[tuple[int, int], deque[Arrival]] = {}
        """What the user of a request that is under way has left of its session."""
        for _ in range(users):
            self._send(deque(), 0.0)

    @property
    def next_s(self) -> float:
        """See ``Arrivals``."""
        return self._due[0][0] if self._due else NEVER

    def pop(self) -> Arrival:
        """See ``Arrivals``."""
        return heappop(self._due)[2]

    def over(self, arrival: Arrival, now_s: float) -> None:
        """See ``Arrivals``."""
        self._send(self._own.pop((arrival.copy, arrival.number)), now_s)

    def _send(self, session: deque[Arrival], now_s: float) -> None:
        if not session:
            if not self._sessions:
                return
            session = self._sessions.popleft()
        if self._duration_s and now_s >= self._duration_s:
            return
        arrival = session.popleft()._replace(at_s=now_s)
        self._own[arrival.copy, arrival.number] = session
        heappush(self._due, (now_s, next(self._ticks), arrival))
