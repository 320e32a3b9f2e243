"""How late an event loop is: a timer that is due every so often, and notes when it was called."""

from asyncio import AbstractEventLoop, TimerHandle
from bisect import bisect_left
from typing import Final

import msgspec

from kvcontrol.series.gateway import LAG_SECONDS

_EVERY_S: Final = 0.1


class LagReport(msgspec.Struct, frozen=True, kw_only=True):
    """How many of its turns were how late, by ``LAG_SECONDS`` (each bucket alone, the last above all of them)."""

    buckets: list[int]
    total_s: float


class LoopLag:
    """Watches one event loop, on that loop, from ``start`` until ``stop``; ``report`` on any thread."""

    def __init__(self) -> None:
        self._buckets = [0] * (len(LAG_SECONDS) + 1)
        self._total_s = 0.0
        self._timer: TimerHandle | None = None

    def start(self, loop: AbstractEventLoop) -> None:
        """Ten times a second from now on; once."""
        self._wait(loop)

    def stop(self) -> None:
        """Idempotent; what was counted stays."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def report(self) -> LagReport:
        """Return what was seen so far; numbers may be a moment apart."""
        return LagReport(buckets=list(self._buckets), total_s=self._total_s)

    def _wait(self, loop: AbstractEventLoop) -> None:
        due_s = loop.time() + _EVERY_S
        self._timer = loop.call_at(due_s, self._look, loop, due_s)

    def _look(self, loop: AbstractEventLoop, due_s: float) -> None:
        late_s = max(0.0, loop.time() - due_s)
        self._buckets[bisect_left(LAG_SECONDS, late_s)] += 1
        self._total_s += late_s
        self._wait(loop)
