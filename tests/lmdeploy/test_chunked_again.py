"""What is computed in chunks is no answer before its last one, also when it was one before, or is cancelled."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.lmdeploy.schedule.pacing import pacer_of
from kvcontrol.scheduler_ir.pacing import make_pace
from tests.support.disturbed_engine import DisturbedEngine, Ended
from tests.support.models import greedy_reference, random_prompt

pytestmark = pytest.mark.engine

ANSWERED = random_prompt(440, 41)
NEW_TOKENS = 140
"""With them 37 blocks of 40; a chunk of the other prompt takes 8."""
CHUNKED = random_prompt(590, 44)
PACES = {"lmdeploy": {}, "alternate": {}, "itl_target": {"itl_target_ms": 1.0, "prefill_share": 0.5}}


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[int]:
    return greedy_reference(tiny_llama, [ANSWERED], NEW_TOKENS)[0]


@pytest.fixture(scope="module", autouse=True)
def _hooks(_cpu_engine: None) -> Iterator[None]:
    from engines.lmdeploy.hooks import schedule_hooks, step_hooks
    from engines.lmdeploy.patching import install

    undo = install([*schedule_hooks(), *step_hooks()])
    yield
    undo()


@pytest.mark.parametrize("pace", PACES)
def test_the_only_answer_is_computed_again_in_chunks_after_the_prompt_that_took_its_blocks_was_cancelled(
    tiny_llama: Path, expected: list[int], pace: str
) -> None:
    with DisturbedEngine.start(
        tiny_llama, num_gpu_blocks=40, max_prefill_token_num=128, enable_prefix_caching=False
    ) as engine:
        pacer = pacer_of(engine.scheduler)
        assert pacer is not None
        pacer.swap(make_pace(pace, PACES[pace]))

        async def story() -> tuple[Ended, Ended]:
            first, second = engine._next_session, engine._next_session + 1
            answer = asyncio.create_task(engine.follow(ANSWERED, new_tokens=NEW_TOKENS))
            while not engine._got_tokens:
                await asyncio.sleep(0)
            chunked = asyncio.create_task(engine.follow(CHUNKED, new_tokens=2))
            (seq,) = engine.scheduler.sessions[first].sequences.values()
            while seq.num_blocks:  # it is preempted, and then its blocks are taken
                assert first in engine.running
                await asyncio.sleep(0)
            assert engine.local.preempted
            await engine.local.engine.create_instance().async_cancel(second)
            return await answer, await chunked

        answer, chunked = engine.do(story)
        assert answer == Ended("FINISH", expected)
        assert chunked.how in {"CANCEL", "FINISH"}


@pytest.mark.parametrize("pace", PACES)
def test_a_prompt_that_is_cancelled_between_its_chunks_leaves_a_fresh_engine_that_answers(
    tiny_llama: Path, expected: list[int], pace: str
) -> None:
    with DisturbedEngine.start(
        tiny_llama, num_gpu_blocks=40, max_prefill_token_num=64, enable_prefix_caching=False
    ) as engine:
        pacer = pacer_of(engine.scheduler)
        assert pacer is not None
        pacer.swap(make_pace(pace, PACES[pace]))

        async def story() -> tuple[Ended, Ended]:
            session = engine._next_session
            chunked = asyncio.create_task(engine.follow(CHUNKED, new_tokens=2))
            while engine.scheduler.scheduler_tick < 3:  # two of its ten chunks were sent
                await asyncio.sleep(0)
            await engine.local.engine.create_instance().async_cancel(session)
            return await chunked, await engine.follow(ANSWERED, new_tokens=NEW_TOKENS)

        cancelled, answer = engine.do(story)
        assert cancelled.how == "CANCEL"
        assert answer == Ended("FINISH", expected)
