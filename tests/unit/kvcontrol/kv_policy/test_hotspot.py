"""The lineage of prefixes: what follows what, what is used soon, and never more kept than allowed."""

import random
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcontrol.kv_policy import PolicyError
from kvcontrol.kv_policy.hotspot import HotspotLineage
from tests.support.examples import examples


def chained(*choices: int) -> list[tuple[int, ...]]:
    """Return keys of a path: each names all before it, as a chained hash does."""
    return [tuple(choices[: place + 1]) for place in range(len(choices))]


def test_what_came_after_a_prompt_is_known_with_its_share() -> None:
    lineage = HotspotLineage()
    for way in (1, 1, 1, 2):
        lineage.observe(chained(7, 8, way, 9), 0)
    assert lineage.followers(chained(7, 8)) == [((7, 8, 1), 0.75), ((7, 8, 2), 0.25)]
    assert lineage.followers([]) == [((7,), 1.0)]
    assert lineage.followers(chained(7)) == [], "no run ends there"
    assert lineage.followers(chained(5)) == []
    lineage.check_integrity()


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), max_size=60), st.integers(1, 40))
@settings(deadline=None, max_examples=examples(80))
def test_any_prompts_are_kept_whole_within_bounds(prompts: list[list[int]], most: int) -> None:
    lineage = HotspotLineage(max_blocks=most)
    for now, prompt in enumerate(prompts):
        lineage.observe(chained(*prompt), now)
        lineage.check_integrity()
        assert lineage.blocks <= most
    plan = lineage.plan(len(prompts), budget_blocks=5, least_probability=0, wanted=lambda _: True)
    assert len(plan.keys) == len(set(plan.keys)) <= 5


def test_of_a_prompt_longer_than_all_that_is_kept_its_beginning_is_and_others_go_as_room_is_needed() -> None:
    lineage, stepwise = HotspotLineage(max_blocks=50), HotspotLineage(max_blocks=50)
    for each in (lineage, stepwise):
        each.observe(("a", "b"), 1.0)
        each.observe(tuple(range(45)), 2.0)
    lineage.observe(tuple(range(1_000)), 12.0)
    stepwise.observe(tuple(range(50)), 12.0)
    lineage.check_integrity()
    assert lineage.blocks == 50
    assert lineage.followers(()) == [(0, 1.0)], "others were forgotten: no room was left"
    assert lineage.followers(range(45)) == [(45, 1.0)]
    assert lineage.followers(range(50)) == []
    for each in (lineage, stepwise):
        each.observe(("a", "b", "c"), 13.0)
    plans = [
        each.plan(14, budget_blocks=99, least_probability=0, wanted=lambda _: True) for each in (lineage, stepwise)
    ]
    assert plans[0] == plans[1]
    assert set(plans[0].keys) == {"a", "b", "c", *range(45)}, "the oldest leaf went, as always"


def regular(rounds: int, chats: int = 5, period_s: float = 20.0) -> HotspotLineage:
    """Chats that come back every ``period_s``, and strangers that never do."""
    lineage = HotspotLineage(horizon_s=4)
    rng = random.Random(1)  # noqa: S311 - reproducible, not secret
    for number in range(rounds * chats):
        now_s = number * period_s / chats
        lineage.observe(chained(1, number % chats, 5, 6), now_s)
        lineage.observe(chained(2, rng.getrandbits(40), 1), now_s + 0.5)
    return lineage


def test_a_chat_that_is_due_is_planned_head_first_and_one_that_just_was_here_is_not() -> None:
    lineage = regular(rounds=150)
    now_s = 150 * 20.0 - 1  # chat 0 is due in a second, chat 4 was here 3 seconds ago
    missing = {key for chat in range(5) for key in chained(1, chat, 5, 6)[1:]}
    plan = lineage.plan(now_s, budget_blocks=100, least_probability=0.5, wanted=missing.__contains__)
    assert plan.keys[:3] == tuple(chained(1, 0, 5, 6)[1:])
    assert (1, 4) not in plan.keys
    assert all(prefetch.probability >= 0.5 for prefetch in plan.prefetches)
    assert "0.5" in plan.reason


def test_what_is_there_already_is_not_planned() -> None:
    lineage = regular(rounds=150)
    plan = lineage.plan(150 * 20.0 - 1, budget_blocks=100, least_probability=0.5, wanted=lambda _: False)
    assert plan.keys == ()


def test_a_budget_is_kept() -> None:
    lineage = regular(rounds=150)
    plan = lineage.plan(150 * 20.0 - 1, budget_blocks=2, least_probability=0.0, wanted=lambda _: True)
    assert len(plan.keys) == 2


def test_bounds_that_cannot_be_are_refused() -> None:
    for blocks in (0, -1, 1.5, float("nan"), float("inf"), True):
        with pytest.raises(PolicyError, match=r"max_blocks is .*; it must be >= 1, a whole number"):
            HotspotLineage(max_blocks=cast("int", blocks))
    for seconds in (0, -1, float("nan"), float("inf"), 1e308):
        with pytest.raises(PolicyError, match=r"horizon_s is .*; it must be > 0 and finite"):
            HotspotLineage(horizon_s=seconds)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), 1e308, "1", None, 10**400])
def test_what_cannot_be_is_refused_and_changes_nothing(wrong: Any) -> None:
    lineage, untouched = regular(rounds=3), regular(rounds=3)
    path = chained(1, 2)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("now_s is", lambda: lineage.observe(path, wrong)),
        ("now_s is", lambda: lineage.plan(wrong, budget_blocks=1, least_probability=0, wanted=lambda _: True)),
        ("budget_blocks is", lambda: lineage.plan(0, budget_blocks=wrong, least_probability=0, wanted=lambda _: True)),
        ("least_probability is", lambda: lineage.plan(0, budget_blocks=1, least_probability=wrong, wanted=bool)),
        (r"keys\[2\] is", lambda: lineage.observe([*path, [wrong]], 99.0)),
        (r"keys\[0\] is", lambda: lineage.followers([[wrong]])),
    ]
    for named, call in calls:
        if named == "budget_blocks is" and wrong == 10**400:
            continue  # a budget may be as large as one likes
        with pytest.raises(PolicyError, match=rf"^{named} .*; (it must be|allowed (is|are)) "):
            call()
    lineage.check_integrity()
    for each in (lineage, untouched):
        each.observe(chained(1, 0, 9), 61.0)
    plans = [
        each.plan(62, budget_blocks=99, least_probability=0, wanted=lambda _: True) for each in (lineage, untouched)
    ]
    assert plans[0] == plans[1]


def test_a_clock_that_is_set_back_teaches_nothing_else() -> None:
    back, still = HotspotLineage(), HotspotLineage()
    for place in range(200):
        back.observe(("a", "b", place % 3), 1_000.0 if place % 2 else 1_000.0 - place)
        still.observe(("a", "b", place % 3), 1_000.0)
    back.check_integrity()
    plans = [
        each.plan(1_005.0, budget_blocks=9, least_probability=0.0, wanted=lambda _: True) for each in (back, still)
    ]
    assert plans[0] == plans[1]
