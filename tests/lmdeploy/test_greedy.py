"""The engine's greedy tokens are transformers' own, however the scheduler cuts the work into pieces."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.engine import LocalEngine, Sampling
from tests.support.models import greedy_reference, random_prompt

pytestmark = pytest.mark.engine

Tokens = list[list[int]]
Start = Callable[..., LocalEngine]

NEW_TOKENS = 24
# Below, at and above one block of 16, one of 64, and up to several of both.
LENGTHS = (5, 15, 16, 17, 63, 64, 65, 130, 200, 333)


@pytest.fixture(scope="module")
def prompts() -> Tokens:
    return [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def expected(tiny_llama: Path, prompts: Tokens) -> Tokens:
    return greedy_reference(tiny_llama, prompts, NEW_TOKENS)


@pytest.fixture
def engine(tiny_llama: Path) -> Iterator[Start]:
    started: list[LocalEngine] = []

    def start(**config: object) -> LocalEngine:
        started.append(LocalEngine.start(tiny_llama, **config))
        return started[-1]

    yield start
    for each in started:
        with each:
            pass


def test_a_batch_of_mixed_lengths_gives_transformers_tokens(engine: Start, prompts: Tokens, expected: Tokens) -> None:
    assert engine().generate(prompts) == expected


def test_one_prompt_at_a_time_gives_transformers_tokens(engine: Start, prompts: Tokens, expected: Tokens) -> None:
    local = engine()
    assert [local.generate([prompt])[0] for prompt in prompts] == expected


@pytest.mark.parametrize("chunk_tokens", [128, 100])
def test_chunked_prefill_gives_transformers_tokens(
    engine: Start, prompts: Tokens, expected: Tokens, chunk_tokens: int
) -> None:
    local = engine(max_prefill_token_num=chunk_tokens, enable_prefix_caching=True)
    assert local.generate(prompts) == expected


def test_prefix_hits_give_transformers_tokens_and_are_counted(engine: Start, prompts: Tokens, expected: Tokens) -> None:
    local = engine(enable_prefix_caching=True)
    assert local.generate(prompts) == expected
    before = local.hit_tokens
    assert local.generate(prompts) == expected
    # Whole blocks only, and never the last prompt token.
    assert local.hit_tokens - before == sum((length - 1) // 16 * 16 for length in LENGTHS)


def test_kernel_blocks_smaller_than_scheduler_blocks_give_transformers_tokens(
    engine: Start, prompts: Tokens, expected: Tokens
) -> None:
    local = engine(block_size=64, kernel_block_size=16, enable_prefix_caching=True)
    assert local.generate(prompts) == expected
    assert local.generate(prompts) == expected


def test_a_pool_too_small_for_the_batch_gives_transformers_tokens(
    engine: Start, prompts: Tokens, expected: Tokens
) -> None:
    local = engine(num_gpu_blocks=26)  # 25 usable blocks of 16; the batch needs 66
    assert local.generate(prompts) == expected


def test_preempted_sequences_give_transformers_tokens(engine: Start, tiny_llama: Path) -> None:
    prompts = [random_prompt(60, 100 + seed) for seed in range(6)]
    local = engine(num_gpu_blocks=30)  # all six fit when admitted (24 blocks) and not when each has grown to 8
    assert local.generate(prompts, Sampling(new_tokens=64)) == greedy_reference(tiny_llama, prompts, 64)
    assert local.preempted


def test_qwen2_gives_transformers_tokens(tiny_qwen2: Path) -> None:
    prompts = [random_prompt(length, 200 + length) for length in (5, 16, 65, 130)]
    with LocalEngine.start(tiny_qwen2, enable_prefix_caching=True) as local:
        assert local.generate(prompts) == greedy_reference(tiny_qwen2, prompts, NEW_TOKENS)
