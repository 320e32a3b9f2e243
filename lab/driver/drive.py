"""Sends work to a target, by the clock or by users who wait for their answers, and collects what comes of it."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from lab.driver.answer import Answer
from lab.driver.chats import Chats
from lab.driver.work import Pace, Planned, Work


@dataclass(slots=True)
class Run:
    """Where a run stands. ``answers`` are those that have ended, in that order; ``in_flight`` how many run."""

    total: int
    answers: list[Answer] = field(default_factory=list)
    in_flight: int = 0
    sent: int = 0
    ended_s: float = 0.0


class Driver:
    """Drives one run. ``clock`` counts from its beginning; ``duration_s`` is how long requests are sent.

    When ``stop`` is set nothing more is sent and what runs is given up: its answers say ``interrupted``. What runs at
    the end of ``duration_s`` is waited for: each request has its own limit of time.
    """

    def __init__(
        self, work: Work, chats: Chats, clock: Callable[[], float], *, duration_s: float | None, stop: asyncio.Event
    ) -> None:
        self._work = work
        self._chats = chats
        self._clock = clock
        self._duration_s = duration_s
        self._stop = stop
        self.run = Run(total=len(work.requests))

    async def open_loop(self) -> None:
        """Send every request when it is due, however many are still running."""
        async with self._stoppable() as start:
            for planned in self._work.requests:
                if self._over(planned.at_s) or not await self._slept_until(planned.at_s):
                    break
                start(self._ask(planned, due_s=planned.at_s))

    async def closed_loop(self, pace: Pace) -> None:
        """Let users take sessions one after another, or requests where there are none, and work through each."""
        waiting = deque(sessions(self._work.requests))
        async with self._stoppable() as start:
            for _ in range(pace.users or 1):
                start(self._user(waiting, pace.think_s))

    @asynccontextmanager
    async def _stoppable(self) -> AsyncIterator[Callable[[Coroutine[None, None, None]], None]]:
        """Yield what starts tasks; at the end all of them have ended, at once where the run is stopped."""
        running: set[asyncio.Task[None]] = set()

        async def cancel_when_stopped() -> None:
            await self._stop.wait()
            for each in list(running):
                each.cancel()

        stopper = asyncio.create_task(cancel_when_stopped())
        try:
            async with asyncio.TaskGroup() as group:

                def start(work: Coroutine[None, None, None]) -> None:
                    task = group.create_task(work)
                    running.add(task)
                    task.add_done_callback(running.discard)

                yield start
        finally:
            stopper.cancel()

    async def _user(self, waiting: deque[list[Planned]], think_s: float) -> None:
        while waiting:
            for planned in waiting.popleft():
                now_s = self._clock()
                if self._over(now_s) or self._stop.is_set():
                    return
                await self._ask(planned, due_s=now_s)
                if think_s and not await self._slept_until(self._clock() + think_s):
                    return

    async def _ask(self, planned: Planned, *, due_s: float) -> None:
        answer = Answer(
            number=planned.number,
            due_s=due_s,
            planned_tokens=planned.prompt_tokens,
            reusable_tokens=planned.reusable_tokens,
        )
        run = self.run
        run.in_flight += 1
        run.sent += 1
        try:
            messages = [{"role": "user", "content": self._work.content(planned)}]
            await self._chats.ask(messages, planned.output_tokens, answer)
        finally:
            run.in_flight -= 1
            run.answers.append(answer)
            run.ended_s = self._clock()

    def _over(self, at_s: float) -> bool:
        return self._duration_s is not None and at_s >= self._duration_s

    async def _slept_until(self, at_s: float) -> bool:
        """Wait until then; False when the run was stopped before."""
        left_s = at_s - self._clock()
        if left_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._stop.wait()
        return not self._stop.is_set()


def sessions(requests: Sequence[Planned]) -> Iterator[list[Planned]]:
    """Yield what one user does in a row: the requests of a session, or a single one where there are no sessions."""
    by_name: dict[str, list[Planned]] = {}
    for each in requests:
        by_name.setdefault(each.session or f"\0{each.number}", []).append(each)
    yield from by_name.values()
