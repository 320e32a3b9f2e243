"""What a request reports as cached is what its first look-up found, however often it had to give up its blocks."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engine import ANSWER_WITHIN_S, LocalEngine
from tests.support.examples import examples
from tests.support.models import random_prompt

pytestmark = pytest.mark.engine

BLOCK = 16
NEW_TOKENS = 160
FRESH = count(10**9, 100)
"""Seeds of prompts that no test of this engine asked before; an example takes fewer than a hundred."""
_sessions = count(1)


@dataclass(frozen=True, slots=True)
class Answer:
    """The counts that came with a request's tokens, one for each output."""

    prompt: tuple[int, ...]
    cached: tuple[int, ...]


@pytest.fixture(scope="module")
def local(tiny_llama: Path, _cpu_engine: None) -> Iterator[LocalEngine]:
    from engines.lmdeploy.hooks import (
        event_hooks,
        eviction_hooks,
        schedule_hooks,
        step_hooks,
        tenant_hooks,
        usage_hooks,
    )
    from engines.lmdeploy.patching import install

    own = [*event_hooks(), *eviction_hooks(), *tenant_hooks(), *schedule_hooks(), *step_hooks()]
    undo = install([*own, *usage_hooks()])
    with LocalEngine.start(tiny_llama, num_gpu_blocks=64, enable_prefix_caching=True) as engine:
        yield engine
    undo()


def ask(local: LocalEngine, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Answer]:
    """Ask all prompts at once."""
    from lmdeploy.messages import GenerationConfig

    async def one(prompt: Sequence[int]) -> Answer:
        config = GenerationConfig(max_new_tokens=new_tokens, top_k=1, temperature=1.0, ignore_eos=True)
        cached = [
            int(output.req_metrics.cached_tokens)
            async for output in local.engine.create_instance().async_stream_infer(
                next(_sessions), list(prompt), gen_config=config
            )
            if output.req_metrics is not None
        ]
        return Answer(tuple(prompt), tuple(cached))

    async def run() -> list[Answer]:
        local.engine.start_loop()
        async with asyncio.timeout(ANSWER_WITHIN_S):
            return await asyncio.gather(*map(one, prompts))

    return local.runner.run(run())


def counted(local: LocalEngine) -> tuple[int, int]:
    """Prompt tokens looked up in the prefix cache, and those found there."""
    stats = local.engine.scheduler.block_trie.stats
    return int(stats.num_query_tokens), int(stats.num_hit_tokens)


def test_cold_prompts_that_are_preempted_report_nothing_cached(local: LocalEngine) -> None:
    before, preempted = counted(local), len(local.preempted)
    answers = ask(local, [random_prompt(87 + 2 * seed, seed) for seed in range(12)], NEW_TOKENS)
    assert len(local.preempted) > preempted
    assert {cached for answer in answers for cached in answer.cached} == {0}
    queried, found = counted(local)
    assert (queried - before[0], found - before[1]) == (sum(len(answer.prompt) for answer in answers), 0)


@settings(max_examples=examples(12, least=5), deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 90)), min_size=6, max_size=12),
    new_tokens=st.sampled_from([40, 120, 200]),
)
def test_each_request_reports_one_count_and_all_of_them_are_what_the_cache_found(
    local: LocalEngine, shapes: list[tuple[int, int]], new_tokens: int
) -> None:
    seed = next(FRESH)  # the engine remembers the prompts of earlier examples
    heads = [random_prompt(48, seed + place) for place in range(3)]
    prompts = [heads[head] + random_prompt(tail, seed + 10 + place) for place, (head, tail) in enumerate(shapes)]
    before = counted(local)
    answers = ask(local, prompts, new_tokens)
    for answer in answers:
        assert len(set(answer.cached)) == 1, "a request's count changed while it ran"
        assert answer.cached[0] % BLOCK == 0
        assert answer.cached[0] <= (48 if len(answer.prompt) > 48 else 32)  # its tail is its own
    queried, found = counted(local)
    assert queried - before[0] == sum(map(len, prompts))
    assert found - before[1] == sum(answer.cached[0] for answer in answers)


def test_a_second_turn_of_a_session_has_a_count_of_its_own(local: LocalEngine) -> None:
    prompt = random_prompt(100, next(FRESH))
    assert ask(local, [prompt], 8)[0].cached[-1] == 0
    assert ask(local, [prompt], 8)[0].cached[-1] == 96
