"""Prompts beside answers in a running engine: who computes when, in chunks of which size, and the same tokens."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvcontrol.core.steps import Step
from kvcontrol.scheduler_ir.pacing import make_pace
from tests.support.engine import LocalEngine, Sampling
from tests.support.models import greedy_reference, random_prompt
from tests.support.paced_engine import Answer, pacer, run, steps, until

pytestmark = pytest.mark.engine

Start = Callable[..., LocalEngine]
CHUNK = 64
LENGTHS = (5, 15, 17, 63, 65, 130, 200, 333)
NEW_TOKENS = 24
PACES = {
    "lmdeploy": {},
    "alternate": {},
    "itl_target": {"itl_target_ms": 20.0},
    "itl_target(least)": {"itl_target_ms": 1.0, "prefill_share": 0.05},
}


@pytest.fixture(scope="module", autouse=True)
def _hooks(_cpu_engine: None) -> Iterator[None]:
    from engines.lmdeploy.hooks import schedule_hooks, step_hooks
    from engines.lmdeploy.patching import install

    undo = install([*schedule_hooks(), *step_hooks()])
    yield
    undo()


@pytest.fixture
def engine(tiny_llama: Path) -> Iterator[Start]:
    started: list[LocalEngine] = []

    def start(pace: str = "alternate", **config: object) -> LocalEngine:
        local = LocalEngine.start(tiny_llama, **config)
        started.append(local)
        pacer(local).swap(make_pace(pace.partition("(")[0], PACES[pace]))
        return local

    yield start
    for each in started:
        with each:
            pass
        found = pacer(each)
        assert (found.errors, found.failed) == (0, False)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def expected(tiny_llama: Path, prompts: list[list[int]]) -> list[list[int]]:
    return greedy_reference(tiny_llama, prompts, NEW_TOKENS)


def last(local: LocalEngine) -> int:
    found = steps(local)
    return found[-1].number if found else 0


async def beside(local: LocalEngine, prompts: Sequence[Sequence[int]]) -> list[Step]:
    """Return the steps in which prompts were computed beside a running answer, which goes on all the while."""
    answer = Answer(local)
    before = last(local)
    await until(lambda: any(step.kind == "decode" for step in steps(local, before)))
    await asyncio.gather(*(local._one(prompt, Sampling(new_tokens=2)) for prompt in prompts))
    assert not answer.is_over
    await answer.stop()
    return [step for step in steps(local, before) if step.number > before + 1]


def runs_of_prefills(found: Sequence[Step]) -> list[int]:
    """Return how many prefill steps come one after the other while answers wait."""
    runs, length = [], 0
    for step in found:
        if step.kind == "decode":
            runs.append(length)
            length = 0
        elif step.stalled:
            length += 1
    return [each for each in runs if each]


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("chunk_tokens", [64, 100])
def test_every_pace_gives_transformers_tokens_in_chunks_and_with_prefix_hits(
    engine: Start, prompts: list[list[int]], expected: list[list[int]], pace: str, chunk_tokens: int
) -> None:
    local = engine(pace, max_prefill_token_num=chunk_tokens, enable_prefix_caching=True)
    assert local.generate(prompts) == expected
    assert local.generate(prompts) == expected


@pytest.mark.parametrize("pace", PACES)
def test_every_pace_gives_transformers_tokens_when_sequences_are_preempted(
    engine: Start, tiny_llama: Path, pace: str
) -> None:
    prompts = [random_prompt(60, 100 + seed) for seed in range(6)]
    local = engine(pace, num_gpu_blocks=30, max_prefill_token_num=CHUNK)
    assert local.generate(prompts, Sampling(new_tokens=64)) == greedy_reference(tiny_llama, prompts, 64)
    assert local.preempted


@pytest.mark.parametrize("pace", ["alternate", "itl_target", "itl_target(least)"])
def test_a_decode_step_follows_each_prefill_step_that_answers_wait_for(engine: Start, pace: str) -> None:
    local = engine(pace, max_prefill_token_num=CHUNK, enable_prefix_caching=False)
    found = run(local, beside(local, [random_prompt(150 + place, place) for place in range(4)]))
    runs = runs_of_prefills(found)
    assert len(runs) >= 12
    assert set(runs) == {1}


def test_lmdeploys_own_rule_computes_prompts_one_after_the_other(engine: Start) -> None:
    local = engine("lmdeploy", max_prefill_token_num=CHUNK, enable_prefix_caching=False)
    found = run(local, beside(local, [random_prompt(60, place) for place in range(6)]))
    assert max(runs_of_prefills(found)) > 1
    assert {step.reason for step in found} == {"lmdeploy"}


def test_a_lone_prompt_is_computed_in_full_chunks_without_a_pause(engine: Start) -> None:
    local = engine("itl_target(least)", max_prefill_token_num=CHUNK)
    local.generate([random_prompt(20, 1)])  # what steps cost is known
    before = last(local)
    local.generate([random_prompt(300, 2)])
    found = steps(local, before)
    begun = next(place for place, step in enumerate(found) if step.kind != "decode")
    assert [(step.kind, step.tokens) for step in found[begun : begun + 5]] == [
        *[("chunk", 64)] * 4,
        ("prefill", 44),
    ]
    assert {step.reason for step in found[begun : begun + 5]} == {"nobody_answers"}


@pytest.mark.parametrize("pace", ["alternate", "itl_target", "itl_target(least)"])
def test_every_pace_gives_the_logprobs_of_lmdeploys_own_rule(engine: Start, pace: str) -> None:
    prompts = [random_prompt(length, 300 + length) for length in (10, 90, 150, 150)]

    def ask(local: LocalEngine) -> list[list[dict[int, float]]]:
        async def one(session: int, prompt: Sequence[int]) -> list[dict[int, float]]:
            from lmdeploy.messages import GenerationConfig

            config = GenerationConfig(max_new_tokens=12, top_k=1, logprobs=3, ignore_eos=True)
            found: list[dict[int, float]] = []
            instance = local.engine.create_instance()
            async for output in instance.async_stream_infer(session, list(prompt), gen_config=config):
                found.extend(output.logprobs or [])
            return found

        async def all_of_them() -> list[list[dict[int, float]]]:
            return await asyncio.gather(*(one(900 + place, prompt) for place, prompt in enumerate(prompts)))

        return run(local, all_of_them())

    stock = ask(engine("lmdeploy", max_prefill_token_num=CHUNK, logprobs_mode="raw_logprobs"))
    ours = ask(engine(pace, max_prefill_token_num=CHUNK, logprobs_mode="raw_logprobs"))
    assert [len(each) for each in ours] == [12] * 4
    for one, other in zip(stock, ours, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)


def test_a_pace_is_exchanged_while_prompts_are_computed_and_tokens_stay_the_same(
    engine: Start, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    local = engine("itl_target", max_prefill_token_num=CHUNK, enable_prefix_caching=True)
    paces = [make_pace(name.partition("(")[0], values) for name, values in PACES.items()]

    async def story() -> list[list[int]]:
        answers = asyncio.gather(*(local._one(prompt, Sampling(new_tokens=NEW_TOKENS)) for prompt in prompts))
        place = 0
        while not answers.done():
            place += 1
            pacer(local).swap(paces[place % len(paces)])
            await asyncio.sleep(0.001)
        return await answers

    assert run(local, story()) == expected


def test_a_pace_that_fails_leaves_the_steps_to_lmdeploy_and_says_so(
    tiny_llama: Path, prompts: list[list[int]], expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with LocalEngine.start(tiny_llama, max_prefill_token_num=CHUNK) as local:
        found = pacer(local)
        found.swap(make_pace("itl_target"))
        found._costs.decode_s = lambda *_: 1 / 0  # type: ignore[method-assign]  # a defect
        with caplog.at_level(logging.ERROR):
            assert local.generate(prompts) == expected
        assert found.failed
        assert found.errors == 1
        assert "LMDeploy's own rule is in charge" in caplog.text
        sizes = local.engine.scheduler._prefill_scheduler.cache_config
        assert sizes.max_prefill_token_num == CHUNK


def test_the_engines_own_configuration_keeps_its_chunk(engine: Start, prompts: list[list[int]]) -> None:
    local = engine("itl_target(least)", max_prefill_token_num=CHUNK)
    local.generate(prompts)
    assert local.engine.cache_config.max_prefill_token_num == CHUNK
