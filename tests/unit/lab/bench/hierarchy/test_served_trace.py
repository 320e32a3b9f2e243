"""Tokens are counted where they come from, whatever the tiers' sizes and policy; nothing is found that wasn't there."""

import random
from array import array

import pytest

from kvcontrol.kv_policy import POLICIES, EvictionPolicy, make_policy
from lab.bench.hierarchy.served_trace import Served, Sizes, TracedEngine, serve
from lab.traces import Request

BLOCK = 4


def prompt(*ids: int, session: str = "", tokens: int | None = None) -> Request:
    return Request(
        block_ids=array("q", ids),
        block_tokens=BLOCK,
        prompt_tokens=BLOCK * len(ids) if tokens is None else tokens,
        at_s=0,
        session=session,
    )


def make(name: str, capacity: int) -> EvictionPolicy:
    return make_policy(name, capacity_blocks=capacity)


def served(requests: list[Request], sizes: Sizes, policy: str = "lru") -> Served:
    return serve(requests, sizes, policy=policy, make_policy=make, window=5)


def test_what_was_computed_once_is_found_in_the_fastest_tier_that_still_has_it() -> None:
    first, others = prompt(1, 2, 3, 4), [prompt(10, 11, 12, 13), prompt(20, 21, 22, 23)]
    sizes = {
        "hbm": (Sizes(hbm=16), [first, first]),
        "ddr": (Sizes(hbm=4, ddr=16), [first, *others, first]),
        "nvme": (Sizes(hbm=4, ddr=4, nvme=16), [first, *others, first]),
    }
    for tier, (tiers, requests) in sizes.items():
        total = served(requests, tiers).total
        assert getattr(total, tier) == total.found == 4 * BLOCK, tier
        assert total.again == 0


def test_without_room_what_was_known_is_computed_again() -> None:
    first, others = prompt(1, 2, 3, 4), [prompt(10, 11, 12, 13)]
    end = served([first, *others, first], Sizes(hbm=4))
    assert end.total.found == 0
    assert end.total.again == 4 * BLOCK
    assert (end.hit_rate, end.of_ceiling) == (0, 0)
    assert end.ceiling == end.re_prefill_rate == pytest.approx(1 / 3)


def test_a_partial_last_block_counts_its_tokens_only() -> None:
    short = prompt(1, 2, tokens=5)
    total = served([short, short], Sizes(hbm=4)).total
    assert (total.prompt, total.hbm) == (10, 5)


def test_a_prompt_longer_than_hbm_is_cached_as_far_as_it_goes() -> None:
    long = prompt(*range(1, 10))
    total = served([long, long], Sizes(hbm=4, ddr=20)).total
    assert total.hbm == 4 * BLOCK
    assert total.again == 5 * BLOCK


def test_fairness_is_over_tenants_and_what_each_could_have_found() -> None:
    a, b = prompt(1, 2, session="a"), prompt(11, 12, session="b")
    fair = served([a, b, a, b], Sizes(hbm=8))
    assert fair.fairness == 1
    unfair = served([a, b, a, prompt(*range(20, 28), session="c"), b], Sizes(hbm=8))
    assert unfair.tenants["b"].again == 2 * BLOCK
    assert unfair.fairness == 0.5


def test_the_course_adds_up() -> None:
    end = served([prompt(number % 3, 10 + number % 4) for number in range(23)], Sizes(hbm=4, ddr=8))
    assert len(end.course) == 5
    assert sum(window.prompt for window in end.course) == end.total.prompt
    assert sum(window.found for window in end.course) == end.total.found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sizes", [Sizes(hbm=12), Sizes(hbm=12, ddr=30), Sizes(hbm=12, ddr=20, nvme=60)])
def test_any_policy_serves_a_random_forest_of_prompts(policy: str, sizes: Sizes) -> None:
    rng = random.Random(3)  # noqa: S311 - reproducible, not secret
    engine = TracedEngine(sizes, policy=policy, make_policy=make)
    seen: set[int] = set()
    try:
        for _ in range(120):
            node, ids = 1, []
            for _ in range(rng.randrange(1, 11)):
                node = 3 * node + rng.randrange(2 if len(ids) < 4 else 3)
                ids.append(node)
            said = engine.serve(prompt(*ids, session=str(ids[0])))
            known = next((place for place, content in enumerate(ids) if content not in seen), len(ids))
            assert said.found + said.again == known * BLOCK
            seen.update(ids)
            engine.check_integrity()
        assert sum(tokens.found for tokens in engine.tokens.values()) > 0
    finally:
        engine.close()


@pytest.mark.parametrize("sizes", [(0, 0, 0), (1, -1, 0), (1, 0, 5)])
def test_sizes_that_cannot_be_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="HBM must be > 0, and NVMe needs DDR above it"):
        Sizes(hbm=sizes[0], ddr=sizes[1], nvme=sizes[2])
