"""A local engine's pace and steps, and stories told on its loop."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from engines.lmdeploy.schedule.pacing import Pacer, pacer_of
from engines.lmdeploy.schedule.step_watch import timeline_of
from kvcontrol.core.steps import Step, StepsQuery
from tests.support.engine import ANSWER_WITHIN_S, LocalEngine


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


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition of the engine."""
    while not condition():
        await asyncio.sleep(0.001)


__all__ = ["pacer", "run", "steps", "until"]
