"""A shadow of keys does what three lines and a ghost list do, step by step."""

import math
from random import Random

import pytest

from kvcontrol.kv_policy.adaptive import WEIGHTS
from kvcontrol.kv_policy.ghost import GhostList
from kvcontrol.kv_policy.three_lines import LRU, OFTEN, ThreeLines, Weights
from kvcontrol.kv_policy.weight_shadow import WeightShadow


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("capacity", [1, 7, 30])
def test_it_holds_what_three_lines_would_hold(weights: Weights, capacity: int) -> None:
    rng = Random(capacity)  # noqa: S311 - reproducible, not secret
    shadow = WeightShadow(weights, ghosts=2)
    lines: ThreeLines[int] = ThreeLines()
    uses: dict[int, int] = {}
    left: GhostList[int] = GhostList(2 * capacity)
    for _ in range(1_500):
        key = int(rng.expovariate(1 / capacity)) if rng.random() < 0.7 else rng.randrange(10_000)
        there = key in lines
        if there:
            lines.drop(key, uses[key])
        else:
            while len(lines) >= capacity and (victim := lines.first(weights)) is not None:
                lines.drop(victim, uses[victim])
                left.put(victim, uses.pop(victim))
            uses[key] = left.take(key) or 0
        uses[key] = min(OFTEN, uses[key] + 1)
        lines.put(key, uses[key])
        assert shadow.use(key, capacity) is there
        prompt = [rng.randrange(2 * capacity) for _ in range(3)]
        assert shadow.find(prompt) == next((place for place, each in enumerate(prompt) if each not in lines), 3)


def test_what_it_won_fades_and_its_spread_with_it() -> None:
    shadow = WeightShadow(LRU, ghosts=4)
    shadow.lead = 8
    shadow.end_period(0.5)
    assert (shadow.won, shadow.lead, shadow.spread) == (4.0, 0, pytest.approx(math.sqrt(32)))
    shadow.end_period(0.5)
    assert shadow.won == 2.0
