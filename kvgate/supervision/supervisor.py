"""Several processes that live and die together.

``Supervisor`` starts all at once and waits until all are ready; one that ends before that is a failure of the whole:
somebody is there to mend it. Then it keeps them: one that ends, or no longer answers, starts again after a pause that
doubles, until it has ended too often in a row. Leaving the context stops all, in the reverse order of their stages, in
bounded time. If the supervisor is killed, the watchdog stops them.
"""

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvgate.supervision import watchdog
from kvgate.supervision.child import Child, ChildFailedError, ChildSpec

PROBE_EVERY_S = 0.2
ALIVE_EVERY_S = 5.0
"""Between two looks whether a child that was ready still answers."""
STOP_GRACE_S = 15.0
"""Longer than the gateway gives its running requests."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
STEADY_S = 60.0
"""Who ran for so long was well: what ended before is forgiven."""
TRIES = 5
"""So often in a row a child may end without having been well."""


class State(StrEnum):
    """What a child is doing, as a watcher sees it."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"


Probe = Callable[[str], Awaitable[bool]]
"""Whether the URL of a child answers 200 now; never raises for a child that isn't up yet."""

Watcher = Callable[[str, State, float], None]
"""Called with a child's name, its new state, and the seconds since it was started."""

OnEnd = Callable[[ChildFailedError, float], None]
"""Called with how a child ended that is to go on, and the seconds until it starts again."""


class Supervisor:
    """Starts the children of ``stages`` in a context and stops them when it ends.

    A stage is what is stopped together: the last stage first, so that a gateway goes before its engines. All are
    started at once. ``folder`` gets the logs.
    """

    def __init__(  # noqa: PLR0913 - wired once
        self,
        stages: Sequence[Sequence[ChildSpec]],
        folder: Path,
        probe: Probe,
        watcher: Watcher,
        *,
        grace_s: float = STOP_GRACE_S,
        first_pause_s: float = FIRST_PAUSE_S,
        alive_every_s: float = ALIVE_EVERY_S,
    ) -> None:
        self._stages = stages
        self._folder = folder
        self._probe = probe
        self._watcher = watcher
        self._grace_s = grace_s
        self._first_pause_s = first_pause_s
        self._alive_every_s = alive_every_s
        self._children: list[list[Child]] = []
        self._watchdog: asyncio.subprocess.Process | None = None
        self._started_s: dict[str, float] = {}
        self._owned: set[int] = set()  # groups that may be signalled: a number that was given back may be another's now

    @property
    def children(self) -> list[Child]:
        """All children in the order of their stages."""
        return [child for stage in self._children for child in stage]

    async def __aenter__(self) -> Self:
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
                    self._children[-1].append(await self._born(spec))
                    await self._let_go(self._children[-1][-1])
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

    async def keep(self, on_end: OnEnd) -> None:
        """Keep the children, which are ready, running; never returns.

        Raises ``ChildFailedError`` of one that ended ``TRIES`` times in a row without having run for ``STEADY_S``.
        """
        keepers = [
            asyncio.ensure_future(self._keep(stage, place, on_end))
            for stage in self._children
            for place in range(len(stage))
        ]
        try:
            await asyncio.gather(*keepers)
        finally:
            for each in keepers:
                each.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)

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

    async def _keep(self, stage: list[Child], place: int, on_end: OnEnd) -> None:
        ended = await self._end_of_ready(stage[place])
        tries, since_s = 0, self._started_s[stage[place].name]
        while True:
            tries = 1 if time.monotonic() - since_s >= STEADY_S else tries + 1
            if tries > TRIES:
                raise ended
            pause_s = min(LONGEST_PAUSE_S, self._first_pause_s * 2 ** (tries - 1))
            on_end(ended, pause_s)
            await stage[place].stop(grace_s=self._grace_s)  # and all that it started
            self._owned.discard(stage[place].pid)
            await self._notify_watchdog(f"-{stage[place].pid}")
            await asyncio.sleep(pause_s)
            child = stage[place] = await self._born(stage[place].spec)
            await self._let_go(child)
            since_s = self._started_s[child.name]
            ended = await self._end_of(child)

    async def _end_of(self, child: Child) -> ChildFailedError:
        """Return how a child that was just started ended; one that isn't ready in time has."""
        try:
            if not await _came_first(self._until_child_ready(child), child):
                return child.failure()
        except ChildFailedError as late:
            return late
        return await self._end_of_ready(child)

    async def _end_of_ready(self, child: Child) -> ChildFailedError:
        """Return how a child that was ready ended; one that no longer answers has, and is still to be stopped."""
        if child.spec.alive_url is None:
            await child.wait()
        elif await _came_first(self._until_silent(child, child.spec.alive_url), child):
            what = f"did not answer {child.spec.alive_url} in {child.spec.silent_tries} tries"
            return ChildFailedError(child.name, what, child.log)
        return child.failure()

    async def _until_silent(self, child: Child, url: str) -> None:
        """Return when a child has not answered for so many tries in a row.

        Tries are counted and not seconds: a machine that slept has not been silent.
        """
        silent = 0
        while silent < child.spec.silent_tries:
            await asyncio.sleep(self._alive_every_s)
            silent = 0 if await self._probe(url) else silent + 1

    async def _born(self, spec: ChildSpec) -> Child:
        self._started_s[spec.name] = time.monotonic()
        child = await Child.start(spec, self._folder)
        self._owned.add(child.pid)
        return child

    async def _let_go(self, child: Child) -> None:
        await self._notify_watchdog(f"+{child.pid}")
        await child.let_go()
        self._report(child, State.STARTING)

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
                owned = [child for child in stage if child.pid in self._owned]
                await asyncio.gather(*(child.stop(grace_s=self._grace_s) for child in owned))
        finally:
            for child in self.children:
                if child.pid not in self._owned:
                    continue
                watchdog.signal_group(child.pid, signal.SIGKILL)
                await self._notify_watchdog(f"-{child.pid}")
            if self._watchdog is not None and self._watchdog.stdin is not None:
                self._watchdog.stdin.close()
                await self._watchdog.wait()

    async def _notify_watchdog(self, line: str) -> None:
        """Return when the line is in the watchdog's pipe, where it outlives this process."""
        if self._watchdog is not None and self._watchdog.stdin is not None:
            # Someone may have killed the watchdog; the children are still stopped in order.
            with contextlib.suppress(ConnectionError):
                self._watchdog.stdin.write(f"{line}\n".encode())
                await self._watchdog.stdin.drain()

    def _report(self, child: Child, state: State) -> None:
        self._watcher(child.name, state, time.monotonic() - self._started_s[child.name])


async def _came_first(work: Coroutine[Any, Any, None], child: Child) -> bool:
    """Await ``work`` and return True, or cancel it and return False when the child ends first; raises what it does."""
    wanted, ends = asyncio.ensure_future(work), asyncio.ensure_future(child.wait())
    try:
        await asyncio.wait({wanted, ends}, return_when=asyncio.FIRST_COMPLETED)
        if ends.done():
            return False
        wanted.result()
        return True
    finally:
        for task in (wanted, ends):
            task.cancel()
        await asyncio.gather(wanted, ends, return_exceptions=True)


async def _all(work: Sequence[Awaitable[object]]) -> None:
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
