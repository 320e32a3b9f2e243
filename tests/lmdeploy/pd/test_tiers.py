"""One instance prefills into its tiers, the other loads from there: real processes, and a wire that can be broken."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.pd_pair import Pair, at_once, complete, pd_of, tiered_pair_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LENGTHS = (5, 15, 16, 17, 64, 65, 130, 513, 1100)


@pytest.fixture(scope="module")
def pair(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    options = ("--session-len", "4096", "--max-prefill-token-num", "512")
    settings = {"KVGATE_ENGINE_PD_TRANSFER_TIMEOUT_S": "60"}
    with tiered_pair_of(tiny_llama, tmp_path_factory.mktemp("pd"), *options, settings=settings) as pair:
        yield pair


def body_of(letters: int, seed: int = 0, **more: Any) -> dict[str, Any]:
    dice = random.Random(letters * 1000 + seed)  # noqa: S311
    prompt = "".join(dice.choice("bcdfghjklmnpqrstvwxz") for _ in range(letters))
    return {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, **more}


@pytest.mark.parametrize("stream", [False, True])
def test_completions_are_those_of_one_instance_at_every_length(pair: Pair, *, stream: bool) -> None:
    before = pd_of(pair.decode)
    bodies = [body_of(letters, seed=stream) for letters in LENGTHS]
    found = at_once(lambda body: pair.complete(body, stream=stream), bodies)
    after = pd_of(pair.decode)
    expected = at_once(lambda body: complete(pair.prefill, body), bodies)
    assert [answer.text for answer in found] == [answer.text for answer in expected]
    for answer, alone in zip(found, expected, strict=True):
        assert answer.usage["prompt_tokens"] == alone.usage["prompt_tokens"]
        assert answer.usage["completion_tokens"] == 12
        assert not (answer.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    assert after.recomputed == before.recomputed
    assert after.fetched == before.fetched + sum(answer.usage["prompt_tokens"] > 16 for answer in expected)
    pair.until_idle()
