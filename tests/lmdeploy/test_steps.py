"""The timeline of a real engine's steps."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.lmdeploy.schedule.step_timeline import StepTimeline
from engines.lmdeploy.schedule.step_watch import timeline_of
from kvcontrol.core.steps import Step, StepsQuery, StepsReport
from tests.support.engine import LocalEngine, Sampling
from tests.support.models import random_prompt

pytestmark = pytest.mark.engine

CHUNK = 64


@pytest.fixture(scope="module")
def engine(_cpu_engine: None, tiny_llama: Path) -> Iterator[LocalEngine]:
    from engines.lmdeploy.hooks import step_hooks
    from engines.lmdeploy.patching import install

    undo = install(step_hooks())
    with LocalEngine.start(tiny_llama, max_prefill_token_num=CHUNK, enable_prefix_caching=True) as local:
        yield local
    undo()


def timeline(engine: LocalEngine) -> StepTimeline:
    found = timeline_of(engine.engine.scheduler)
    assert found is not None
    return found


def steps_of(engine: LocalEngine, prompts: list[list[int]], new_tokens: int) -> list[Step]:
    after = 0 if timeline_of(engine.engine.scheduler) is None else last_of(engine)
    engine.generate(prompts, Sampling(new_tokens=new_tokens))
    steps = timeline(engine).report(StepsQuery(last=8192, after=after)).steps
    begun = next(place for place, step in enumerate(steps) if step.kind != "decode")  # before it: the last ones' rest
    return steps[begun:]


def last_of(engine: LocalEngine) -> int:
    steps = timeline(engine).report(StepsQuery(last=1)).steps
    return steps[-1].number if steps else 0


def report(engine: LocalEngine) -> StepsReport:
    return timeline(engine).report(StepsQuery())


def test_a_long_prompt_is_chunks_and_then_a_token_a_step(engine: LocalEngine) -> None:
    steps = steps_of(engine, [random_prompt(150, 1)], 8)
    assert [(step.kind, step.tokens, step.history_tokens) for step in steps[:3]] == [
        ("chunk", 64, 0),
        ("chunk", 64, 64),
        ("prefill", 22, 128),
    ]
    decoded = [step for step in steps if step.kind == "decode"]
    assert len(decoded) + 3 == len(steps)
    assert 7 <= len(decoded) <= 9  # one or two more are on their way when the last token is seen
    assert {(step.sequences, step.tokens) for step in decoded} == {(1, 1)}
    assert [step.history_tokens for step in decoded[:3]] == [150, 151, 152]
    assert all(step.device_s > 0 and step.launch_s > 0 for step in steps)


def test_a_prompt_that_is_cached_is_history(engine: LocalEngine) -> None:
    prompt = random_prompt(60, 2)
    steps_of(engine, [prompt], 1)
    first = steps_of(engine, [prompt], 1)[0]
    assert (first.kind, first.tokens, first.history_tokens) == ("prefill", 12, 48)


def test_steps_sum_up_and_idle_time_without_requests_is_no_work(engine: LocalEngine) -> None:
    steps_of(engine, [random_prompt(20, 3)], 4)

    async def nothing() -> None:
        await asyncio.sleep(0.05)

    engine.runner.run(nothing())
    first, *others = steps_of(engine, [random_prompt(20, 4), random_prompt(20, 5)], 4)
    assert first.no_work_s > 0
    assert sum(step.no_work_s for step in others) == 0
    found = report(engine)
    assert (found.clock, found.lost) == ("wall", 0)
    assert sum(found.summary.shares.values()) == pytest.approx(1)


def test_answers_that_stand_still_for_another_prompt_are_counted(engine: LocalEngine) -> None:
    async def story() -> None:
        engine.engine.start_loop()
        running = asyncio.ensure_future(engine._one(random_prompt(20, 6), Sampling(new_tokens=80)))
        before = last_of(engine)
        while not any(step.kind == "decode" for step in timeline(engine).report(StepsQuery(after=before)).steps):
            await asyncio.sleep(0.001)
        await engine._one(random_prompt(200, 7), Sampling(new_tokens=2))
        await running

    before = last_of(engine)
    engine.runner.run(story())
    steps = timeline(engine).report(StepsQuery(last=8192, after=before)).steps
    chunks = [step for step in steps if step.kind == "chunk"]
    assert [step.stalled for step in chunks] == [1, 1, 1]
    assert all(step.stalled == 0 for step in steps if step.kind == "decode")
