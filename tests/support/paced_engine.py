"""A local engine's pace and steps, and stories told on its loop."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from engines.lmdeploy.schedule.pacing import Pacer, pacer_of
from engines.lmdeploy.schedule.step_watch import timeline_of
from kvcontrol.core.steps import Step, StepsQuery
from tests.support.engine import ANSWER_WITHIN_S, LocalEngine
from tests.support.models import random_prompt

PROMPT = random_prompt(9, 77)
MOST_TOKENS = 1200
"""More than any story takes, however slow its machine."""


def pacer(local: LocalEngine) -> Pacer:
    """Return the engine's pacer."""
    found = pacer_of(local.engine.scheduler)
    assert found is not None
    return found


def steps(local: LocalEngine, after: int = 0) -> list[Step]:
    """Return the engine's steps after number ``after``."""
    timeline = timeline_of(local.engine.scheduler)
    return [] if timeline is None else timeline.report(StepsQuery(last=8192, after=after)).steps


def run(local: LocalEngine, story: Coroutine[Any, Any, Any]) -> Any:
    """Run a story on the engine's loop, which it starts, in bounded time."""

    async def bounded() -> Any:
        local.engine.start_loop()
        async with asyncio.timeout(ANSWER_WITHIN_S):
            return await story

    return local.runner.run(bounded())


class Answer:
    """An answer to ``PROMPT`` that goes on for as long as a story needs it; made on the engine's loop."""

    def __init__(self, local: LocalEngine, most_tokens: int = MOST_TOKENS) -> None:
        self.tokens: list[int] = []
        self._local = local
        self._session = next(local._sessions)
        self._reading = asyncio.ensure_future(self._read(most_tokens))

    @property
    def is_over(self) -> bool:
        return self._reading.done()

    async def end(self) -> None:
        """Wait for its last token."""
        await self._reading

    async def stop(self, after: int = 0) -> Sequence[int]:
        """Cancel it when it has so many more tokens, and return all of them."""
        wanted = len(self.tokens) + after
        await until(lambda: len(self.tokens) >= wanted or self.is_over)
        await self._local.engine.create_instance().async_cancel(self._session)
        await self._reading
        return self.tokens

    async def _read(self, most_tokens: int) -> None:
        from lmdeploy.messages import GenerationConfig, ResponseType

        config = GenerationConfig(max_new_tokens=most_tokens, top_k=1, ignore_eos=True)
        instance = self._local.engine.create_instance()
        async for output in instance.async_stream_infer(self._session, PROMPT, gen_config=config):
            assert output.status in {ResponseType.SUCCESS, ResponseType.FINISH, ResponseType.CANCEL}, output.status
            self.tokens.extend(output.token_ids)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition of the engine."""
    while not condition():
        await asyncio.sleep(0.001)


__all__ = ["MOST_TOKENS", "PROMPT", "Answer", "pacer", "run", "steps", "until"]
