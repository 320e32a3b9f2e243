"""A hundred prompts from a few tokens to three thousand, eight at a time, streamed and not: alike, and nothing left."""

import random
from typing import Any

import pytest

from tests.support.pd_pair import Pair, at_once, complete, pd_of

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

COUNT = 100


def test_a_hundred_prompts_are_answered_as_by_one_instance(pair: Pair) -> None:
    dice = random.Random(1)  # noqa: S311
    lengths = [5, 3000, *(dice.randrange(5, 3000) for _ in range(COUNT - 2))]
    jobs: list[tuple[dict[str, Any], bool]] = []
    for letters in lengths:
        prompt = "".join(dice.choice("bcdfghjklmnpqrstvwxz") for _ in range(letters))
        jobs.append(({"prompt": prompt, "max_tokens": 16, "ignore_eos": True}, dice.random() < 0.5))
    before = pd_of(pair.decode)
    alone = at_once(lambda job: complete(pair.decode, job[0]), jobs)
    apart = at_once(lambda job: pair.complete(job[0], stream=job[1]), jobs)
    assert [each.text for each in apart] == [each.text for each in alone]
    assert [each.usage["prompt_tokens"] for each in apart] == [each.usage["prompt_tokens"] for each in alone]
    assert max(each.usage["prompt_tokens"] for each in apart) > 2000
    after = pd_of(pair.decode)
    assert after.recomputed == before.recomputed
    assert after.fetched == before.fetched + COUNT
    pair.until_idle()
