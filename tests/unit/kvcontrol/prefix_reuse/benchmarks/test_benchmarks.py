"""The benchmarks measure what they say, and replays of the traces give their known ceilings."""

from pathlib import Path

import pytest

from kvcontrol.prefix_reuse.benchmarks import fleet, index, replay

TRACES = Path(__file__).parents[6] / "shared" / "traces"

needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the traces are not beside this checkout")


def test_a_small_fleet_is_measured_in_every_way() -> None:
    metrics = fleet.run(fleet.FleetPlan(blocks=20_000, instances=4, lookups=60, naive_lookups=5))
    assert metrics["held_blocks"] >= 20_000
    assert all(value > 0 for value in metrics.values())
    assert {"lookup_188_p50_us", "lookup_2048_p50_us", "events_per_s", "bytes_per_held_block"} <= metrics.keys()


def test_a_held_block_costs_less_than_200_bytes() -> None:
    metrics = fleet.run(fleet.FleetPlan(blocks=100_000, instances=64, lookups=10, naive_lookups=1))
    assert metrics["bytes_per_held_block"] <= 200


def test_a_small_index_is_measured_in_every_way() -> None:
    metrics = index.run(index.IndexPlan(blocks=5_000, lookups=20))
    assert "index_lookup_5e3_188_p50_us" in metrics
    assert all(value > 0 for value in metrics.values())


@needs_traces
def test_mooncakes_conversations_repeat_as_much_as_is_known_of_them() -> None:
    found = replay.replay(replay.mooncake(TRACES / replay.MOONCAKE), capacity_blocks=1 << 40)
    assert found.requests == 12_031
    assert round(found.block_hit_rate, 4) == 0.3664
    assert round(found.token_hit_rate, 4) == 0.3736


@needs_traces
@pytest.mark.parametrize(("capacity_blocks", "blocks", "tokens"), [(1_000, 0.04453, 0.04541)])
def test_a_bounded_index_evicts_as_an_independent_lru_does(capacity_blocks: int, blocks: float, tokens: float) -> None:
    found = replay.replay(replay.mooncake(TRACES / replay.MOONCAKE), capacity_blocks=capacity_blocks)
    assert (round(found.block_hit_rate, 5), round(found.token_hit_rate, 5)) == (blocks, tokens)
