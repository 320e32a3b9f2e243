"""When an instance that passes its health checks is left alone all the same, because requests fail there.

    CLOSED ──failures in a row, or an outlier──▶ OPEN ──after a pause──▶ HALF_OPEN ──one good answer──▶ CLOSED
                                                  ▲                        │
                                                  └──pause doubles──────one failure

Half open it gets one request at a time. An instance that was away comes back half open, so the first real answer, not
the health check alone, gives it its full share again. Failures here are those of the instance (no answer, a cut answer,
502 to 504), never a request's own fault.
"""

from dataclasses import dataclass
from enum import StrEnum


class BreakerState(StrEnum):
    """What an instance may be given: everything, nothing, one request at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerRules:
    """``failures`` in a row open it, for ``pause_s``, doubling up to ``longest_pause_s``. A trial that has said nothing
    for ``trial_s`` keeps nobody else out.
    """

    failures: int = 5
    pause_s: float = 1.0
    longest_pause_s: float = 30.0
    trial_s: float = 5.0


class Breaker:
    """One instance's. Times are seconds of the caller's clock; every call is O(1)."""

    __slots__ = ("_failures", "_next_pause_s", "_rules", "_state", "_trial_until_s", "_until_s", "reason")

    def __init__(self, rules: BreakerRules) -> None:
        self._rules = rules
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._until_s = 0.0
        self._trial_until_s = 0.0
        self._next_pause_s = rules.pause_s
        self.reason = ""

    def state(self, now_s: float) -> BreakerState:
        if self._state is BreakerState.OPEN and now_s >= self._until_s:
            self._state = BreakerState.HALF_OPEN
            self._trial_until_s = 0.0
        return self._state

    @property
    def closed(self) -> bool:
        return self._state is BreakerState.CLOSED

    def allows(self, now_s: float) -> bool:
        """Whether a request may go there now."""
        if self._state is BreakerState.CLOSED:
            return True
        return self.state(now_s) is BreakerState.HALF_OPEN and now_s >= self._trial_until_s

    def on_trial(self, now_s: float) -> bool:
        """Whether its trial is under way, so that the next request may hope for its outcome."""
        return self.state(now_s) is BreakerState.HALF_OPEN and now_s < self._trial_until_s

    def left_s(self, now_s: float) -> float:
        """Return for how long it is going to allow nothing, if nothing happens before."""
        if self.allows(now_s):
            return 0.0
        return (self._until_s if self._state is BreakerState.OPEN else self._trial_until_s) - now_s

    def picked(self, now_s: float) -> None:
        """Note that a request goes there: half open it is the trial."""
        if self._state is BreakerState.HALF_OPEN:
            self._trial_until_s = now_s + self._rules.trial_s

    def trial_over(self) -> None:
        """Note that a trial has ended; where nothing was learned by it, the next request is one."""
        self._trial_until_s = 0.0

    def succeeded(self) -> None:
        """Note a good answer."""
        self._failures = 0
        if self._state is not BreakerState.CLOSED:
            self._state = BreakerState.CLOSED
            self._next_pause_s = self._rules.pause_s
            self.reason = ""

    def failed(self, now_s: float, reason: str) -> None:
        """Note a failure; enough of them, or one of a trial, open it."""
        self._failures += 1
        if self.state(now_s) is BreakerState.HALF_OPEN or self._failures >= self._rules.failures:
            self.trip(now_s, reason)

    def trip(self, now_s: float, reason: str) -> None:
        """Open it. One that is open already stays open as long as it was going to be."""
        if self.state(now_s) is BreakerState.OPEN:
            return
        self._state = BreakerState.OPEN
        self._until_s = now_s + self._next_pause_s
        self._next_pause_s = min(self._next_pause_s * 2, self._rules.longest_pause_s)
        self._failures = 0
        self.reason = reason

    def returned(self) -> None:
        """Note that the instance is back after its health checks had failed: half open, whatever was before."""
        self._state = BreakerState.HALF_OPEN
        self._trial_until_s = 0.0
        self._failures = 0
        self._next_pause_s = self._rules.pause_s
        self.reason = "it is back and has not answered a request yet"
