"""The bound on a whole request: its queue, all attempts and its answer to the last byte; an operator may end it sooner,
and its client's leaving does.

    with deadline:
        await what_takes_time()          raises DeadlineError at the latest when the time is over,
                                         PlanCancelledError once it was ended, what ``cut`` or ``stop`` was given

Whoever has begun an answer catches the cancellation, asks ``passed``, and ends the answer in its own words.
"""

import re
from asyncio import TimerHandle
from types import TracebackType
from typing import Self

from gateway.errors import ApiError, DeadlineError, InvalidRequestError, PlanCancelledError
from gateway.http.interrupt import Interrupt, InterruptError

HEADER = b"x-kvgate-timeout-s"
_SECONDS = re.compile(rb"\d{1,6}(\.\d{1,6})?")


class Deadline:
    """For one block, once. ``started_s`` is a time of the event loop's clock, which is the monotonic one."""

    __slots__ = ("_at_s", "_ended", "_interrupt", "_limit_s", "_stopped", "_timer")

    def __init__(self, *, started_s: float, limit_s: float) -> None:
        self._limit_s = limit_s
        self._at_s = started_s + limit_s
        self._interrupt = Interrupt()
        self._timer: TimerHandle | None = None
        self._ended: ApiError | None = None
        self._stopped: Exception | None = None

    def end(self, reason: str) -> None:
        """End the block now, as an operator wants it; nothing happens when it has ended already, or is ending."""
        self.cut(PlanCancelledError(reason))

    def cut(self, error: ApiError) -> None:
        """End the block now; its client reads this error. Nothing happens when it has ended already, or is ending."""
        if not self._interrupt.fired:
            self._ended = error
            self._interrupt.fire()

    def stop(self, error: Exception) -> None:
        """End the block now, with this error: there is nobody left to answer. Nothing happens when it has ended
        already, or is ending.
        """
        if not self._interrupt.fired:
            self._stopped = error
            self._interrupt.fire()

    def __enter__(self) -> Self:
        self._interrupt.__enter__()
        self._timer = self._interrupt.loop.call_at(self._at_s, self._interrupt.fire)
        return self

    def check(self) -> None:
        """Go no further than this where the block was ended, and the cancellation was swallowed on its way."""
        self._interrupt.check()

    def passed(self) -> bool:
        """Whether it is what has just cancelled this task, and somebody is there to be told so; the cancellation is
        taken back then.
        """
        return self._stopped is None and self._interrupt.absorb()

    @property
    def error(self) -> ApiError:
        """Why the block ends before it is done."""
        if self._ended is not None:
            return self._ended
        return DeadlineError(f"the request was not done within its {self._limit_s:g} s")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        try:
            self._interrupt.__exit__(kind, error, traceback)
        except InterruptError:
            raise self._stopped or self.error from None


def limit_of(value: bytes | None, *, longest_s: float) -> float:
    """Return the seconds that a request may take, by its own header and at most ``longest_s``.

    Raises ``InvalidRequestError``.
    """
    if value is None:
        return longest_s
    name = HEADER.decode()
    if not _SECONDS.fullmatch(value) or not float(value):
        raise InvalidRequestError(f"{name}: is a number of seconds above 0, like 30 or 2.5", param=name)
    return min(float(value), longest_s)
