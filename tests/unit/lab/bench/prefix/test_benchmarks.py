"""The benchmarks measure what they say, and replays of the traces give their known ceilings."""

from array import array
from pathlib import Path

import pytest

from lab.bench.prefix import fleet, index, race, replay
from lab.bench.prefix.lookup_times import LENGTHS, LookupTimes
from lab.traces import AGENTIC, MOONCAKE, read_by_time, read_trace

TRACES = Path(__file__).parents[6] / "shared" / "traces"

needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the traces are not beside this checkout")


def assert_timed(lookups: tuple[LookupTimes, ...]) -> None:
    for times in lookups:
        assert (times.partial is None) == (times.prompt_blocks == 1)
        outcomes = [outcome for outcome in (times.hit, times.partial, times.miss) if outcome is not None]
        assert all(each.p99_us >= each.p50_us > 0 for each in outcomes)


def test_a_small_fleet_is_measured_in_every_way() -> None:
    measured = fleet.run(fleet.FleetPlan(blocks=20_000, instances=4, lookups=60, naive_lookups=5))
    metrics = measured.metrics
    assert metrics["held_blocks"] >= 20_000
    assert all(value > 0 for value in metrics.values())
    assert {"lookup_188_p50_us", "lookup_2048_p50_us", "events_per_s", "bytes_per_held_block"} <= metrics.keys()
    assert_timed(measured.lookups)
    assert [times.prompt_blocks for times in measured.lookups] == [1, 188, 2_048] * 3


def test_the_fleets_figures_are_those_of_whole_conversations() -> None:
    measured = fleet.run(fleet.FleetPlan(blocks=5_000, instances=2, lookups=20, naive_lookups=3))
    hit = next(times.hit for times in measured.lookups if times.prompt_blocks == 188)
    assert measured.metrics["lookup_188_p50_us"] == hit.p50_us


def test_a_fleet_of_one_instance_is_looked_up_in() -> None:
    lookups = fleet.lookups(fleet.FleetPlan(blocks=5_000, instances=1, lookups=20))
    assert_timed(lookups)
    assert {times.instances for times in lookups} == {1}


def test_a_held_block_costs_less_than_200_bytes() -> None:
    metrics = fleet.run(fleet.FleetPlan(blocks=100_000, instances=64, lookups=10, naive_lookups=1)).metrics
    assert metrics["bytes_per_held_block"] <= 200


def test_a_small_index_is_measured_in_every_way() -> None:
    lookups = index.run(index.IndexPlan(blocks=5_000, lookups=20)).lookups
    assert_timed(lookups)
    structures = ["PrefixReuseIndex.lookup", "PrefixMatcher.verify", "dict walk"]
    assert [times.structure for times in lookups] == structures * (1 + len(LENGTHS))


def test_an_indexs_block_costs_what_the_index_says_of_itself() -> None:
    metrics = index.memory(index.IndexPlan(blocks=20_000))
    assert metrics["index_bytes_per_block_without_tokens"] == metrics["index_bytes_per_block"] - 256
    assert 256 < metrics["index_bytes_per_block"] < 1_000


def test_all_contenders_find_the_same_and_are_timed() -> None:
    plan = race.RacePlan(blocks=3_000, lookups=10)
    lookups = race.race([race.OurIndex(plan), race.HashedDict()], plan)
    assert_timed(lookups)
    assert [times.structure for times in lookups] == [race.OurIndex.name, race.HashedDict.name] * len(LENGTHS)


class Forgetful(race.HashedDict):
    """Holds nothing."""

    def insert(self, prompt: bytes) -> None:
        del prompt


def test_a_contender_that_finds_too_little_is_not_timed() -> None:
    with pytest.raises(AssertionError, match="found 0 tokens where 12032 are held"):
        race.race([Forgetful()], race.RacePlan(blocks=3_000, lookups=10))


def test_a_contender_compares_tokens() -> None:
    contender = race.HashedDict()
    prompt = contender.given(array("I", range(128)))
    contender.insert(prompt)
    assert contender.find(prompt) == 128
    assert contender.find(contender.given(array("I", [*range(64), *range(64)]))) == 64


@needs_traces
def test_mooncakes_conversations_repeat_as_much_as_is_known_of_them() -> None:
    found = replay.replay(read_trace(TRACES / MOONCAKE), capacity_blocks=1 << 40)
    assert found.requests == 12_031
    assert round(found.block_hit_rate, 4) == 0.3664
    assert round(found.token_hit_rate, 4) == 0.3736


@needs_traces
@pytest.mark.parametrize(("capacity_blocks", "blocks", "tokens"), [(1_000, 0.04453, 0.04541)])
def test_a_bounded_index_evicts_as_an_independent_lru_does(capacity_blocks: int, blocks: float, tokens: float) -> None:
    found = replay.replay(read_trace(TRACES / MOONCAKE), capacity_blocks=capacity_blocks)
    assert (round(found.block_hit_rate, 5), round(found.token_hit_rate, 5)) == (blocks, tokens)


@needs_traces
def test_agentic_sessions_have_the_same_requests_one_by_one_and_together() -> None:
    apart = list(read_trace(TRACES / AGENTIC))
    together = read_by_time(TRACES / AGENTIC)
    assert len(apart) == len(together) == 1_567
    assert apart != together
    assert sum(request.prompt_tokens for request in apart) == sum(request.prompt_tokens for request in together)
