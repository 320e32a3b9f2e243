"""Chunks beside decode steps in a running engine: the same tokens, whoever leaves, and the order on the device."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engines.lmdeploy.cpu.device import CpuEvent, CpuStream
from engines.lmdeploy.pauses import StepPauses
from engines.lmdeploy.schedule.overlap import Overlap, overlap_of, provide
from engines.lmdeploy.schedule.step_watch import timeline_of
from kvcontrol.scheduler_ir.pacing import make_pace
from tests.support.engine import LocalEngine, Sampling
from tests.support.models import greedy_reference, random_prompt
from tests.support.paced_engine import MOST_TOKENS, PROMPT, Answer, pacer, run, steps, until

pytestmark = pytest.mark.engine

Start = Callable[..., LocalEngine]
NEW_TOKENS = 24


class HeldEvent(CpuEvent):
    """An event of a device that is slow: it has happened once ``released`` is set."""

    released = True

    def query(self) -> bool:
        return type(self).released


class NotedStream(CpuStream):
    """A stream that remembers for which events it was told to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.awaited: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.awaited.append(event)


@pytest.fixture(scope="module", autouse=True)
def _hooks(_cpu_engine: None) -> Iterator[None]:
    from engines.lmdeploy.hooks import interruption_hooks, schedule_hooks, step_hooks
    from engines.lmdeploy.patching import install

    undo = install([*interruption_hooks(), *schedule_hooks(), *step_hooks()])
    yield
    undo()


@pytest.fixture
def engine(tiny_llama: Path) -> Iterator[Start]:
    """Start engines whose chunks overlap, on a CPU: its second stream computes at once, and its events can be held."""
    started: list[LocalEngine] = []
    HeldEvent.released = True

    def start(**config: object) -> LocalEngine:
        local = LocalEngine.start(tiny_llama, **{"max_prefill_token_num": 64, **config})
        started.append(local)
        pacer(local).swap(make_pace("itl_target", {"itl_target_ms": 1.0, "prefill_share": 0.05}))
        return local

    yield start
    HeldEvent.released = True
    for each in started:
        with each:
            pass
        found = pacer(each)
        assert (found.errors, found.failed) == (0, False)


def overlapping(local: LocalEngine) -> Overlap:
    """Give an engine whose loop runs its second stream, which only GPUs get by themselves."""
    overlap = provide(pacer(local)._maker)
    overlap.make_event = HeldEvent
    pacer(local).overlap = overlap
    return overlap


async def answering(local: LocalEngine, most_tokens: int = MOST_TOKENS) -> Answer:
    """Return an answer that is under way."""
    answer = Answer(local, most_tokens)
    await until(lambda: any(step.kind == "decode" for step in steps(local)))
    return answer


CACHING = [{"enable_prefix_caching": True}, {"enable_prefix_caching": False}]


@pytest.mark.parametrize("config", CACHING)
def test_answers_are_transformers_tokens_while_chunks_overlap(
    engine: Start, tiny_llama: Path, config: dict[str, bool]
) -> None:
    local = engine(**config)
    prompts = [random_prompt(length, seed) for seed, length in enumerate((150, 200, 333, 65, 130))]
    prompts += [prompts[2] + random_prompt(120, 9)]

    async def story() -> list[Sequence[int]]:
        answer = await answering(local)
        overlap = overlapping(local)
        found = await asyncio.gather(*(local._one(prompt, Sampling(new_tokens=NEW_TOKENS)) for prompt in prompts))
        assert not answer.is_over
        assert overlap.count >= len(prompts)
        return [*found, await answer.stop(after=NEW_TOKENS)]

    *found, answer = run(local, story())
    assert found == greedy_reference(tiny_llama, prompts, NEW_TOKENS)
    assert [answer] == greedy_reference(tiny_llama, [PROMPT], len(answer))
    chunks = [step for step in steps(local) if step.kind == "overlapped"]
    assert {(step.stalled, step.reason) for step in chunks} <= {(0, "prompt"), (0, "chunk")}


def test_the_scheduler_that_follows_the_one_of_the_warm_up_gets_the_second_stream(engine: Start) -> None:
    local = engine()

    async def story() -> None:
        from lmdeploy.pytorch.engine.inputs_maker import build_inputs_maker
        from lmdeploy.pytorch.paging import Scheduler

        await until(lambda: pacer(local)._maker is not None)
        overlap = overlapping(local)
        whole = local.engine
        kept = whole.scheduler
        whole.scheduler = Scheduler(whole.scheduler_config, whole.cache_config, seq_meta=whole.seq_meta)
        try:
            assert provide(build_inputs_maker(whole)) is overlap
            assert overlap_of(whole.scheduler.seq_manager) is overlap, (
                "or nobody waits for a chunk that loses its blocks"
            )
            assert overlap._timeline is timeline_of(whole.scheduler) is not timeline_of(kept)
        finally:
            whole.scheduler = kept

    run(local, story())


async def chunk_under_way(local: LocalEngine, overlap: Overlap, prompt: Sequence[int]) -> "asyncio.Future[Any]":
    """Ask for a prompt and return once a chunk of it is on the slow device."""
    HeldEvent.released = False
    asked = asyncio.ensure_future(local._one(prompt, Sampling(new_tokens=NEW_TOKENS)))
    await until(lambda: overlap.count > 0 and overlap._end is not None)
    return asked


def test_answers_go_on_and_no_other_prompt_begins_while_a_chunk_is_under_way(engine: Start, tiny_llama: Path) -> None:
    local = engine()
    prompts = [random_prompt(300, 1), random_prompt(40, 2)]

    async def story() -> list[Sequence[int]]:
        answer = await answering(local)
        overlap = overlapping(local)
        long = await chunk_under_way(local, overlap, prompts[0])
        before = len(steps(local))
        short = asyncio.ensure_future(local._one(prompts[1], Sampling(new_tokens=NEW_TOKENS)))
        await until(lambda: len(steps(local)) >= before + 30)
        assert overlap.is_busy
        assert {(step.kind, step.reason) for step in steps(local)[before + 2 :]} == {("decode", "overlap")}
        HeldEvent.released = True
        found = [await long, await short]
        await answer.stop()
        return found

    assert run(local, story()) == greedy_reference(tiny_llama, prompts, NEW_TOKENS)


def test_a_prompt_goes_on_at_once_where_nobody_answers_any_more_and_waits_on_the_device(
    engine: Start, tiny_llama: Path
) -> None:
    local = engine()
    prompt = random_prompt(300, 1)

    async def story() -> tuple[Sequence[int], list[Any]]:
        answer = await answering(local, most_tokens=200)
        overlap = overlapping(local)
        overlap._agent.stream = stream = NotedStream()
        long = await chunk_under_way(local, overlap, prompt)
        end = overlap._end
        await answer.end()
        found = await long  # the device never says that the chunk is over
        assert end in stream.awaited
        return found, stream.awaited

    found, _ = run(local, story())
    assert [found] == greedy_reference(tiny_llama, [prompt], NEW_TOKENS)


@pytest.mark.parametrize("config", CACHING)
def test_what_follows_waits_for_the_chunk_of_a_prompt_that_was_cancelled(
    engine: Start, tiny_llama: Path, config: dict[str, bool]
) -> None:
    local = engine(**config)
    others = [random_prompt(40, 5), random_prompt(200, 6)]

    async def story() -> list[Sequence[int]]:
        answer = await answering(local)
        overlap = overlapping(local)
        overlap._agent.stream = stream = NotedStream()
        HeldEvent.released = False
        session = next(local._sessions)
        instance = local.engine.create_instance()

        async def doomed() -> None:
            from lmdeploy.messages import GenerationConfig

            config = GenerationConfig(max_new_tokens=NEW_TOKENS, top_k=1)
            async for _ in instance.async_stream_infer(session, random_prompt(300, 1), gen_config=config):
                pass

        asked = asyncio.ensure_future(doomed())
        await until(lambda: overlap.count > 0 and overlap._end is not None)
        end = overlap._end
        assert end not in stream.awaited
        await local.engine.create_instance().async_cancel(session)
        await asked
        assert end in stream.awaited  # before anybody else could get its blocks
        HeldEvent.released = True
        found = await asyncio.gather(*(local._one(prompt, Sampling(new_tokens=NEW_TOKENS)) for prompt in others))
        return [*found, await answer.stop(after=NEW_TOKENS)]

    *found, answer = run(local, story())
    assert found == greedy_reference(tiny_llama, others, NEW_TOKENS)
    assert [answer] == greedy_reference(tiny_llama, [PROMPT], len(answer))


def test_preempted_sequences_are_computed_again_while_chunks_overlap(engine: Start, tiny_llama: Path) -> None:
    local = engine(num_gpu_blocks=30, max_prefill_token_num=32)
    prompts = [random_prompt(90, 100 + seed) for seed in range(6)]

    async def story() -> list[Sequence[int]]:
        first = asyncio.ensure_future(local._one(prompts[0], Sampling(new_tokens=64)))
        await until(lambda: any(step.kind == "decode" for step in steps(local)))
        overlap = overlapping(local)
        found = await asyncio.gather(first, *(local._one(each, Sampling(new_tokens=64)) for each in prompts[1:]))
        assert overlap.count
        return found

    assert run(local, story()) == greedy_reference(tiny_llama, prompts, 64)
    assert local.preempted


def test_a_pause_waits_for_the_chunk_that_is_under_way(engine: Start) -> None:
    local = engine()

    async def story() -> None:
        answer = await answering(local)
        overlap = overlapping(local)
        long = await chunk_under_way(local, overlap, random_prompt(300, 1))
        pauses = StepPauses(local.engine, None)
        busy_within: list[bool] = []

        async def pause() -> None:
            async with pauses.pause():
                busy_within.append(overlap.is_busy)

        pausing = asyncio.ensure_future(pause())
        await until(lambda: pauses.is_paused)  # no step is under way, and the chunk is
        assert (overlap.is_busy, busy_within) == (True, [])
        HeldEvent.released = True
        await pausing
        assert busy_within == [False]
        await long
        await answer.stop()

    run(local, story())


def test_a_chunk_that_sleep_drops_before_it_began_is_not_waited_for(engine: Start, tiny_llama: Path) -> None:
    local = engine()
    prompt = random_prompt(200, 1)

    async def story() -> Sequence[int]:
        await until(lambda: pacer(local).is_possible)  # its loop has begun, and has computed nothing
        overlap = overlapping(local)
        overlap.send({"running": [object()]}, 0.0)
        assert overlap.is_busy
        pacer(local)._maker.reset_runtime_state()
        assert not overlap.is_busy
        return await local._one(prompt, Sampling(new_tokens=NEW_TOKENS))

    assert [run(local, story())] == greedy_reference(tiny_llama, [prompt], NEW_TOKENS)
