"""Several processes that live and die together.

``Supervisor`` starts all at once, waits until all are ready, and then until it is told to stop or one of them ends: one
that ends is a failure of the whole, since what is left would serve half of what was asked for. Leaving the context
stops all, in the reverse order of their stages, in bounded time. If the supervisor is killed, the watchdog stops them.
"""

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Self

from kvgate import watchdog
from kvgate.child import Child, ChildFailedError, ChildSpec

PROBE_EVERY_S = 0.2
STOP_GRACE_S = 15.0
"""Longer than the gateway gives its running requests."""


class State(StrEnum):
    """What a child is doing, as a watcher sees it."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"


Probe = Callable[[str], Awaitable[bool]]
"""Whether the URL of a child answers 200 now; never raises for a child that isn't up yet."""

Watcher = Callable[[str, State, float], None]
"""Called with a child's name, its new state, and the seconds since it was started."""


class Supervisor:
    """Starts the children of ``stages`` in a context and stops them when it ends.

    A stage is what is stopped together: the last stage first, so that a gateway goes before its engines. All are
    started at once. ``folder`` gets the logs.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[ChildSpec]],
        folder: Path,
        probe: Probe,
        watcher: Watcher,
        grace_s: float = STOP_GRACE_S,
    ) -> None:
        self._stages = stages
        self._folder = folder
        self._probe = probe
        self._watcher = watcher
        self._grace_s = grace_s
        self._children: list[list[Child]] = []
        self._watchdog: asyncio.subprocess.Process | None = None
        self._started_s = time.monotonic()

    @property
    def children(self) -> list[Child]:
        """All children in the order of their stages."""
        return [child for stage in self._children for child in stage]

    async def __aenter__(self) -> Self:
        self._started_s = time.monotonic()
        self._watchdog = await asyncio.create_subprocess_exec(
            sys.executable,
            "-IS",
            watchdog.__file__,
            str(self._grace_s),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            for stage in self._stages:
                self._children.append([])
                for spec in stage:
                    child = await Child.start(spec, self._folder)
                    self._children[-1].append(child)
                    await self._tell_watchdog(f"+{child.pid}")
                    await child.let_go()
                    self._report(child, State.STARTING)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def until_ready(self) -> None:
        """Return when every child is ready; raises ``ChildFailedError`` when one ends or exceeds its limit."""
        await self.unless_one_ends(*(self._until_child_ready(child) for child in self.children))

    async def until_one_ends(self) -> None:
        """Never return; raises ``ChildFailedError`` when a child ends."""
        await self.unless_one_ends(asyncio.Event().wait())

    async def unless_one_ends(self, *work: Awaitable[object]) -> None:
        """Await all of ``work``; a child that ends meanwhile cancels it and is raised as ``ChildFailedError``."""
        wanted = asyncio.ensure_future(_all(work))
        ends = {asyncio.ensure_future(child.wait()): child for child in self.children}
        try:
            await asyncio.wait({wanted, *ends}, return_when=asyncio.FIRST_COMPLETED)
            # Several may have ended at once: the one of the first stage is the cause more often than the consequence.
            for end, child in ends.items():
                if end.done():
                    raise child.failure()
            wanted.result()
        finally:
            for task in (wanted, *ends):
                task.cancel()
            await asyncio.gather(wanted, *ends, return_exceptions=True)

    async def _until_child_ready(self, child: Child) -> None:
        try:
            async with asyncio.timeout(child.spec.start_limit_s):
                while not await self._probe(child.spec.ready_url):  # noqa: ASYNC110 - a foreign process sets no Event
                    await asyncio.sleep(PROBE_EVERY_S)
        except TimeoutError:
            limit_s = child.spec.start_limit_s
            raise ChildFailedError(child.name, f"was not ready within {limit_s:.0f} s", child.log) from None
        self._report(child, State.READY)

    async def _stop(self) -> None:
        """Stop the stages, last first; a second cancellation meanwhile kills at once."""
        try:
            for stage in reversed(self._children):
                for child in stage:
                    if child.is_running:
                        self._report(child, State.STOPPING)
                await asyncio.gather(*(child.stop(grace_s=self._grace_s) for child in stage))
        finally:
            for child in self.children:
                watchdog.signal_group(child.pid, signal.SIGKILL)
                await self._tell_watchdog(f"-{child.pid}")
            if self._watchdog is not None and self._watchdog.stdin is not None:
                self._watchdog.stdin.close()
                await self._watchdog.wait()

    async def _tell_watchdog(self, line: str) -> None:
        """Return when the line is in the watchdog's pipe, where it outlives this process."""
        if self._watchdog is not None and self._watchdog.stdin is not None:
            # Someone may have killed the watchdog; the children are still stopped in order.
            with contextlib.suppress(ConnectionError):
                self._watchdog.stdin.write(f"{line}\n".encode())
                await self._watchdog.stdin.drain()

    def _report(self, child: Child, state: State) -> None:
        self._watcher(child.name, state, time.monotonic() - self._started_s)


async def _all(work: Sequence[Awaitable[object]]) -> None:
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


__all__ = ["PROBE_EVERY_S", "Probe", "State", "Supervisor", "Watcher"]
