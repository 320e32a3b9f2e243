"""Ending a block of code from outside, as ``asyncio.timeout`` does it from within.

    with Interrupt() as interrupt:
        somebody.add_done_callback(interrupt.fire)
        await what_may_take_long()

``fire`` cancels the task at its present wait, and the block then raises ``InterruptError``. A cancellation from
elsewhere that comes at the same time goes through as it is. No task is made.
"""

import asyncio
from types import TracebackType
from typing import Self


class InterruptError(Exception):
    """The block was ended by ``Interrupt.fire``."""


class Interrupt:
    """For one block, once."""

    __slots__ = ("_before", "_task", "fired")

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._before = 0
        self.fired = False

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        if self._task is None:
            raise RuntimeError("an interrupt works inside a task")
        self._before = self._task.cancelling()
        return self

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that the block runs on; asked of its task, as ``get_running_loop`` makes a system call on Python
        3.11. Raises ``RuntimeError`` outside of the block.
        """
        if self._task is None:
            raise RuntimeError("the block has not begun, or has ended")
        return self._task.get_loop()

    def fire(self, _cause: object = None) -> None:
        """End the block; nothing happens when it has ended already. Takes an argument so as to be a callback."""
        if self._task is not None and not self.fired:
            self.fired = True
            self._task.cancel()

    def check(self) -> None:
        """Raise the cancellation that ``fire`` has asked for where whoever was waited for has swallowed it: on Python
        3.11 ``asyncio.wait_for`` does when its result comes in the same moment.
        """
        if self.fired and self._task is not None:
            raise asyncio.CancelledError

    def absorb(self) -> bool:
        """Whether ``fire``, and nothing else, is what has just cancelled the task inside the block; its cancellation is
        taken back then, and the block goes on.
        """
        task = self._task
        if task is None or not self.fired:
            return False
        if task.uncancel() > self._before:  # somebody else wants its end, too
            task.cancel()
            return False
        self._task = None
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del traceback
        task, self._task = self._task, None
        if task is None or not self.fired:
            return
        if task.uncancel() <= self._before and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise InterruptError from error
