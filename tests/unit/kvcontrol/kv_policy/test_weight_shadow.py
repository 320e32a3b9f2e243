"""A shadow of keys does what two lines and a ghost list do, step by step."""

import math
from random import Random

import pytest

from kvcontrol.kv_policy.ghost import GhostList
from kvcontrol.kv_policy.two_lines import TwoLines
from kvcontrol.kv_policy.weight_shadow import WeightShadow


@pytest.mark.parametrize("weight", [1.0, 1.7, 4.0, math.inf])
@pytest.mark.parametrize("room", [1, 7, 30])
def test_it_holds_what_two_lines_would_hold(weight: float, room: int) -> None:
    rng = Random(room)  # noqa: S311 - reproducible, not secret
    shadow = WeightShadow(weight, ghosts=2)
    lines: TwoLines[int] = TwoLines()
    left: GhostList[bool] = GhostList(2 * room)
    for _ in range(1_500):
        key = int(rng.expovariate(1 / room)) if rng.random() < 0.7 else rng.randrange(10_000)
        there = lines.use(key)
        if not there:
            while len(lines) >= room and (victim := lines.pop(weight)) is not None:
                left.put(victim, True)  # noqa: FBT003
            lines.put(key, again=left.take(key) is not None)
        assert shadow.use(key, room) is there
        prompt = [rng.randrange(2 * room) for _ in range(3)]
        assert shadow.find(prompt) == next((place for place, each in enumerate(prompt) if each not in lines), 3)


def test_what_it_won_fades_and_its_spread_with_it() -> None:
    shadow = WeightShadow(1.0, ghosts=4)
    shadow.lead = 8
    shadow.end_period(0.5)
    assert (shadow.won, shadow.lead, shadow.spread) == (4.0, 0, pytest.approx(math.sqrt(32)))
    shadow.end_period(0.5)
    assert shadow.won == 2.0
