"""Equal instances share evenly whatever chance does to their answers; a slow one is known for it, and forgiven."""

from collections.abc import Iterator
from random import Random

import pytest

from gateway.routing import Calibration, Candidate, CostAware, CostModel, Query, Speeds
from gateway.routing.slowness import off
from kvcontrol.core import InstanceId

A, B = InstanceId("a"), InstanceId("b")
COSTS = CostModel(prefill_tokens_per_s=2000, decode_load_s=0.02)


class World:
    """Two instances whose answers to like prompts are as regular as those of a busy machine: not at all."""

    def __init__(self, seed: int, *, noise: float = 0.4, hiccups: float = 0.04) -> None:
        self.chance = Random(seed)  # noqa: S311 - a load, no secret
        self.calibration = Calibration(COSTS)
        self.policy = CostAware(COSTS)
        self.noise = noise
        self.hiccups = hiccups

    def answer(self, instance: InstanceId, *, slower: float = 1.0, busy: float = 1.0) -> None:
        chance = self.chance
        tokens, running = chance.randrange(90, 110), chance.randrange(3)
        took_s = (0.02 + tokens / 8000 + running * 0.004) * slower * busy * chance.lognormvariate(0, self.noise)
        if chance.random() < self.hiccups:
            took_s *= 10
        self.calibration.observe(instance, tokens=tokens, running=running, took_s=took_s)

    def burst(self, count: int = 40, *, tokens: int = 900) -> dict[InstanceId, int]:
        """Place prompts that are unlike those before, none of which ends before the last has come."""
        given = {A: 0, B: 0}
        last = dict(given)
        for turn in range(1, count + 1):
            candidates = tuple(
                Candidate(
                    instance=each,
                    in_flight=number,
                    prefill_tokens=number * tokens,
                    recent_tokens=number * tokens,
                    last_cold_request=last[each],
                    speeds=self.calibration.speeds(each),
                )
                for each, number in given.items()
            )
            chosen = self.policy.choose(Query(prompt_tokens=tokens, gap=None, candidates=candidates))
            given[chosen.candidate.instance] += 1
            last[chosen.candidate.instance] = turn
        return given

    def ratio(self) -> float:
        """How many times as long a request waits at A as at B, by what is known."""
        return waits_s(self.calibration.speeds(A)) / waits_s(self.calibration.speeds(B))


def waits_s(speeds: Speeds | None) -> float:
    assert speeds is not None
    return speeds.base_s + 100 / speeds.prefill_tokens_per_s + speeds.decode_load_s


def worlds(**said: float) -> Iterator[World]:
    return (World(seed, **said) for seed in range(200))


@pytest.mark.parametrize(("noise", "hiccups"), [(0.1, 0.0), (0.4, 0.04), (0.6, 0.05)])
def test_two_equal_instances_share_a_burst_evenly(noise: float, hiccups: float) -> None:
    for world in worlds(noise=noise, hiccups=hiccups):
        for _ in range(world.chance.randrange(2, 60)):
            world.answer(world.chance.choice((A, B)))
        assert 12 <= world.burst()[A] <= 28


def test_a_load_that_comes_over_both_makes_neither_slow() -> None:
    """Their answers come in runs, one instance's after the other's, while the machine is now quick, now slow."""
    for world in worlds(noise=0.2):
        for _ in range(12):
            busy = world.chance.choice((1.0, 1.0, 6.0))
            for instance in (A, B):
                for _ in range(world.chance.randrange(1, 12)):
                    world.answer(instance, busy=busy)
        assert 12 <= world.burst()[A] <= 28


def test_one_that_takes_three_times_as_long_is_known_for_it_within_some_ten_answers_and_gets_less() -> None:
    known, shares = [], []
    for world in worlds(noise=0.2, hiccups=0.0):
        for _ in range(50):
            world.answer(A)
            world.answer(B)
        answers = 0
        while world.ratio() < 1.8:
            world.answer(A, slower=3)
            world.answer(B)
            answers += 1
        known.append(answers)
        for _ in range(10):
            world.answer(A, slower=3)
            world.answer(B)
        shares.append(world.burst()[A])
    known.sort()
    assert known[100] <= 10
    assert known[-1] <= 20
    assert max(shares) <= 17
    assert sum(shares) / len(shares) < 14


def test_one_that_is_quick_again_is_soon_taken_for_quick() -> None:
    recovered = []
    for world in worlds(noise=0.2, hiccups=0.0):
        for _ in range(30):
            world.answer(A, slower=3)
            world.answer(B)
        assert world.ratio() > 1.5
        answers = 0
        while world.ratio() > 1.3:
            world.answer(A)
            world.answer(B)
            answers += 1
        recovered.append(answers)
    assert max(recovered) <= 15


def test_what_was_slow_gets_another_chance_while_only_others_answer() -> None:
    world = World(1, noise=0.1, hiccups=0.0)
    for _ in range(30):
        world.answer(A, slower=3)
        world.answer(B)
    ratios = []
    for _ in range(24):
        world.answer(B)
        ratios.append(world.ratio())
    assert ratios[0] > 1.5
    assert ratios[::6] == sorted(ratios[::6], reverse=True)
    assert ratios[-1] < 1.15
    world.answer(A, slower=3)
    assert world.ratio() > 1.5, "still slow: its own past counts again"


def test_the_slow_one_of_many_is_found_and_the_others_stay_equal() -> None:
    world = World(3, noise=0.3, hiccups=0.0)
    names = [InstanceId(f"i{number}") for number in range(12)]
    for _ in range(20):
        for name in names:
            world.answer(name, slower=3 if name == "i4" else 1)
    waits = {name: waits_s(world.calibration.speeds(name)) for name in names}
    slow = waits.pop(InstanceId("i4"))
    assert slow > 2 * max(waits.values())
    assert max(waits.values()) < 1.1 * min(waits.values())


def test_a_millisecond_or_two_make_nobody_slow() -> None:
    world = World(2)
    for _ in range(100):
        world.calibration.observe(A, tokens=10, running=0, took_s=0.002)
        world.calibration.observe(B, tokens=10, running=0, took_s=0.001)
    assert world.calibration.speeds(A) == world.calibration.speeds(B)
    assert off(0.003, 0.001) < 0.3
    assert off(2.0, 1.0) == pytest.approx(0.69, abs=0.01)


def test_what_was_quick_is_taken_for_like_the_others_while_only_it_answers() -> None:
    """A moment that was bad for one instance gives the other all prompts, and nothing contradicts that."""
    for world in worlds():
        for _ in range(30):
            world.answer(A, slower=3)
            world.answer(B)
        for _ in range(20):
            world.answer(B, busy=0.25)
        assert 1 / 1.1 < world.ratio() < 1.1
        assert 12 <= world.burst()[A] <= 28
