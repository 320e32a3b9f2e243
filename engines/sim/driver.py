"""A simulated engine in real time: one timer of the event loop, set to the engine's next event.

The engine's clock is the loop's. A loop that is late finds the engine's events where they belong in time, and tells of
them all at once.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from engines.sim.engine import SimEngine
from engines.sim.sequence import Phase, SimRequest, SimSequence

_FOLLOW_S = 0.05
"""How often the tiers of an idle engine are looked after."""


class Answer:
    """The tokens of one request as they come: iterate over how many came at once."""

    def __init__(self, sequence: SimSequence) -> None:
        self.sequence = sequence
        self._counts: asyncio.Queue[int] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[int]:
        while count := await self._counts.get():
            yield count

    def put(self, count: int) -> None:
        """So many more; 0 ends it."""
        self._counts.put_nowait(count)


class RealTime:
    """Drives one engine; everything on one event loop. ``make`` is given the listener that the engine must have."""

    def __init__(self, make: Callable[["RealTime"], SimEngine]) -> None:
        self.engine = make(self)
        self.longest_gap_s = 0.0
        self._answers: dict[SimSequence, Answer] = {}
        self._early: list[tuple[SimSequence, int]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin, on the loop that runs."""
        self._loop = asyncio.get_running_loop()
        self._follow()

    @asynccontextmanager
    async def answering(self, request: SimRequest) -> AsyncIterator[Answer]:
        """Serve a request while the block runs; whoever leaves early cancels it. Raises ``DoesNotFitError``."""
        loop = self._running()
        sequence = self.engine.submit(request, loop.time())
        answer = self._answers[sequence] = Answer(sequence)
        for early, count in self._early:
            if early is sequence:
                answer.put(count)
        self._early.clear()
        self._arm()
        try:
            yield answer
        finally:
            self._answers.pop(sequence, None)
            if sequence.phase is not Phase.ENDED:
                self.engine.cancel(sequence, loop.time())
                self._arm()

    def produced(self, sequence: SimSequence, tokens: int, now_s: float) -> None:
        """See ``Listener``."""
        del now_s
        self._report(sequence, tokens)

    def ended(self, sequence: SimSequence, now_s: float) -> None:
        """See ``Listener``."""
        del now_s
        self._report(sequence, 0)

    def close(self) -> None:
        """Stop the timer, end the answers and let go of the engine."""
        if self._timer is not None:
            self._timer.cancel()
        for answer in self._answers.values():
            answer.put(0)
        self.engine.close()

    def _report(self, sequence: SimSequence, count: int) -> None:
        answer = self._answers.get(sequence)
        if answer is None:
            self._early.append((sequence, count))
        else:
            answer.put(count)

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise RuntimeError("the engine has not been started")
        return self._loop

    def _follow(self) -> None:
        loop = self._running()
        self.engine.advance(loop.time())
        self._arm()

    def _arm(self) -> None:
        loop = self._running()
        if self._timer is not None:
            self._timer.cancel()
        at_s = loop.time() + _FOLLOW_S
        if not self.engine.idle:
            at_s = min(at_s, self.engine.next_event_s)
        elif self.engine.tiers is None:
            self._timer = None
            return
        self._timer = loop.call_at(at_s, self._follow)
