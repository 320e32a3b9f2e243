"""A request's seed decides its tokens, and nothing else in the batch does."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine import LocalEngine, Sampling
from tests.support.models import random_prompt

pytestmark = pytest.mark.engine

PROMPT = random_prompt(40, 7)


@pytest.fixture(scope="module")
def local(tiny_llama: Path) -> Iterator[LocalEngine]:
    with LocalEngine.start(tiny_llama) as engine:
        yield engine


def _hot(seed: int | None, top_k: int = 0) -> Sampling:
    return Sampling(top_k=top_k, temperature=2.0, seed=seed)


def test_the_same_seed_gives_the_same_tokens(local: LocalEngine) -> None:
    assert local.generate([PROMPT], _hot(11)) == local.generate([PROMPT], _hot(11))


def test_different_seeds_give_different_tokens(local: LocalEngine) -> None:
    outputs = local.generate_each([(PROMPT, _hot(seed)) for seed in range(4)])
    assert len({tuple(tokens) for tokens in outputs}) == 4


def test_requests_without_a_seed_differ(local: LocalEngine) -> None:
    outputs = local.generate_each([(PROMPT, _hot(None)) for _ in range(4)])
    assert len({tuple(tokens) for tokens in outputs}) == 4


def test_neighbours_in_the_batch_change_nothing(local: LocalEngine) -> None:
    alone = local.generate([PROMPT], _hot(11, top_k=50))[0]
    others = [(random_prompt(9 + 30 * n, n), _hot(n, top_k=10 * n)) for n in range(4)]
    assert local.generate_each([*others[:2], (PROMPT, _hot(11, top_k=50)), *others[2:]])[2] == alone
