"""Calls from other threads that must run on the engine's loop thread, the owner of paging and tiers."""

import asyncio
import concurrent.futures
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from engines.control.calls import EngineBusyError

_Answer = TypeVar("_Answer")


class EngineCalls:
    """Calls on one engine's loop (``CallEngine``), possible from ``attach`` on."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Name the loop that the engine runs on."""
        self._loop = loop

    def __call__(self, work: Callable[[], _Answer], *, timeout_s: float) -> _Answer:
        """Return ``work()``, run between two steps of the engine; any thread but the engine's.

        What ``work`` raises is raised here. Raises ``EngineBusyError`` after ``timeout_s``; the call is then cancelled,
        unless it is running at that moment.
        """
        if self._loop is None:
            raise EngineBusyError("the engine's loop has not started yet")
        answer: concurrent.futures.Future[_Answer] = concurrent.futures.Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(work())
            except Exception as error:  # noqa: BLE001  # belongs to the caller
                answer.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(run)
        except RuntimeError as error:
            raise EngineBusyError("the engine's loop has ended") from error
        try:
            return answer.result(timeout_s)
        except concurrent.futures.TimeoutError:
            if not answer.done():
                answer.cancel()
                raise EngineBusyError(f"the engine's loop did not get to the call within {timeout_s:g} s") from None
            raise

    def post(self, work: Callable[[], object]) -> None:
        """Have ``work()`` run between two steps of the engine, some time; never, when its loop has ended. Any thread.

        It must not raise.
        """
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended, and its owner with it
                self._loop.call_soon_threadsafe(work)
