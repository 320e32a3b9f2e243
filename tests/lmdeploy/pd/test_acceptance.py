"""A hundred prompts from a few tokens to three thousand, eight at a time, streamed and not: alike, and nothing left."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcontrol.core.roles import KVTransport
from tests.support.pd_pair import Pair, at_once, complete, pair_of, pd_of, tiered_pair_of

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

COUNT = 100
BLOCK_TOKENS = 16
DDR_BYTES = 256 << 20
"""All of the prompts' blocks, so that each has to be handed over whole."""


@pytest.fixture(params=KVTransport)
def pair(request: pytest.FixtureRequest, tiny_llama: Path, tmp_path: Path) -> Iterator[Pair]:
    options = ("--session-len", "4096", "--max-prefill-token-num", "512")
    settings = {"KVGATE_ENGINE_PD_TRANSFER_TIMEOUT_S": "60"}
    if request.param is KVTransport.TIERS:
        settings["KVGATE_ENGINE_DDR_BYTES"] = str(DDR_BYTES)
    begin = tiered_pair_of if request.param is KVTransport.TIERS else pair_of
    with begin(tiny_llama, tmp_path, *options, settings=settings) as pair:
        yield pair


def test_a_hundred_prompts_are_answered_as_by_one_instance(pair: Pair) -> None:
    dice = random.Random(1)  # noqa: S311
    lengths = [5, 3250, *(dice.randrange(5, 3000) for _ in range(COUNT - 2))]
    jobs: list[tuple[dict[str, Any], bool]] = []
    for letters in lengths:
        prompt = "".join(dice.choice("bcdfghjklmnpqrstvwxz") for _ in range(letters))
        jobs.append(({"prompt": prompt, "max_tokens": 16, "ignore_eos": True}, dice.random() < 0.5))
    before = pd_of(pair.decode)
    apart = at_once(lambda job: pair.complete(job[0], stream=job[1]), jobs)
    after = pd_of(pair.decode)
    # Through the tiers only the instance that prefilled is sure to have computed every prompt itself.
    alone = at_once(lambda job: complete(pair.prefill_or_decode, job[0]), jobs)
    assert [each.text for each in apart] == [each.text for each in alone]
    assert [each.usage["prompt_tokens"] for each in apart] == [each.usage["prompt_tokens"] for each in alone]
    tokens = [each.usage["prompt_tokens"] for each in apart]
    assert min(tokens) <= 5
    assert max(tokens) >= 3000
    assert after.recomputed == before.recomputed
    whole_blocks = sum(pair.is_by_ticket or each.usage["prompt_tokens"] > BLOCK_TOKENS for each in alone)
    assert after.fetched == before.fetched + whole_blocks
    pair.until_idle()
