"""Traffic of the last ten minutes, for the status page and ``kvgate top``, without Prometheus.

What ends is added to the present interval; every ``INTERVAL_S`` that becomes one ``Interval`` of a bounded ring. Memory
is bounded by ``KEPT`` intervals and ``_MOST_TIMES`` times in the present one. It is this process' traffic alone.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from secrets import token_hex
from time import monotonic, time
from typing import Final

from gateway.http.status import BAD_REQUEST
from gateway.telemetry.record import Outcome, RequestRecord

INTERVAL_S: Final = 2.0
KEPT: Final = 300
_MOST_TIMES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """What ended within ``span_s`` seconds before ``at_s`` (since 1970). ``number`` counts from 1.

    The times to the first token are those of streams, from the request's arrival here; None where none began. Of the
    ``known_tokens`` (prompt tokens whose answers say how many were cached) engines found ``cached_tokens``, and routing
    had expected ``expected_tokens``. ``in_flight`` and ``waiting`` are at its end.
    """

    number: int
    at_s: float
    span_s: float
    outcomes: Mapping[Outcome, int]
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    prompt_tokens: int
    completion_tokens: int
    known_tokens: int
    cached_tokens: int
    expected_tokens: int
    in_flight: int
    waiting: int


class Traffic:
    """Owned by ``Telemetry``. Adding a request is O(1), closing an interval O(n log n) in its streams."""

    def __init__(
        self, *, kept: int = KEPT, clock: Callable[[], float] = monotonic, wall: Callable[[], float] = time
    ) -> None:
        self.process = token_hex(4)
        """Tells this process' numbers from another one's."""
        self._ring: deque[Interval] = deque(maxlen=kept)
        self._clock = clock
        self._wall = wall
        self._number = 0
        self._begin()

    def settled(self, record: RequestRecord, outcome: Outcome) -> None:
        """Add one finished request."""
        self._outcomes[outcome] += 1
        answered = record.status is not None and record.status < BAD_REQUEST
        if record.stream and answered and record.first_byte_s is not None:
            self._times.append(record.first_byte_s - record.started_s)
        usage = record.usage
        if usage is None:
            return
        self._prompt += usage.prompt_tokens
        self._completion += usage.completion_tokens
        if usage.cached_tokens is not None:
            self._known += usage.prompt_tokens
            self._cached += usage.cached_tokens
            self._expected += 0 if record.plan is None else record.plan.matched_tokens

    def close(self, *, in_flight: int, waiting: int) -> Interval:
        """End the present interval, keep it and begin the next one."""
        self._number += 1
        times = sorted(self._times)
        interval = Interval(
            number=self._number,
            at_s=self._wall(),
            span_s=self._clock() - self._since_s,
            outcomes=dict(self._outcomes),
            ttft_p50_s=quantile(times, 0.5),
            ttft_p99_s=quantile(times, 0.99),
            prompt_tokens=self._prompt,
            completion_tokens=self._completion,
            known_tokens=self._known,
            cached_tokens=self._cached,
            expected_tokens=self._expected,
            in_flight=in_flight,
            waiting=waiting,
        )
        self._ring.append(interval)
        self._begin()
        return interval

    def since(self, number: int, process: str | None = None) -> tuple[Interval, ...]:
        """Return the kept intervals after this one, oldest first; all of them when the number is another process'."""
        if process not in {None, self.process}:
            number = 0
        return tuple(each for each in self._ring if each.number > number)

    async def run(self, in_flight: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Close an interval every ``INTERVAL_S``, for ever."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.close(in_flight=in_flight(), waiting=waiting())

    def _begin(self) -> None:
        self._since_s = self._clock()
        self._outcomes: Counter[Outcome] = Counter()
        self._times: deque[float] = deque(maxlen=_MOST_TIMES)
        self._prompt = self._completion = self._known = self._cached = self._expected = 0


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least ``share`` of them don't exceed; None of nothing."""
    if not ordered:
        return None
    return ordered[max(0, ceil(share * len(ordered)) - 1)]
