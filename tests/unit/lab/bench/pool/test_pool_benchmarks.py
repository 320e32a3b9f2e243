"""The pool's benchmarks measure full pools with evictions, and follow an engine that loses no request."""

import gzip
from pathlib import Path

import pytest

from lab.bench.pool import allocation, compaction, lengths, packing

TRACES = Path(__file__).parents[6] / "shared" / "traces"
SMALL = allocation.AllocationPlan(blocks=4_096, calls=400)


@pytest.fixture(scope="module")
def workload() -> lengths.Workload:
    return lengths.drawn(requests=300)


def test_every_timed_allocation_finds_a_full_pool_and_nearly_all_evict(workload: lengths.Workload) -> None:
    for timings in (allocation.time_pool(workload, SMALL), allocation.time_manager(workload, SMALL)):
        assert len(timings.wall_s) == len(timings.cpu_s) == len(timings.blocks) == 400
        assert timings.occupancy_min >= 0.95
        assert timings.evicting >= 360
        assert max(timings.blocks) <= allocation.CHUNK_BLOCKS


def test_a_saturated_pool_of_blocks_holds_more_than_contiguous_slots(workload: lengths.Workload) -> None:
    plan = packing.PackingPlan(capacity_tokens=1 << 18, steps=150)
    blocks, slots = packing.pack_blocks(workload, plan), packing.pack_slots(workload, plan)
    assert 0.9 < blocks.utilisation <= 1
    assert blocks.token_utilisation == pytest.approx(blocks.utilisation * (1 - blocks.internal), abs=0.01)
    assert blocks.internal_max < 0.1
    assert slots.token_utilisation < blocks.token_utilisation


def test_an_engine_that_runs_out_of_blocks_preempts_the_youngest_and_goes_on() -> None:
    growing = lengths.Workload(name="growing", requests=(lengths.Length(10, 600),))
    found = packing.pack_blocks(growing, packing.PackingPlan(capacity_tokens=100 * 64, steps=1_500))
    assert found.preemptions > 0
    assert found.utilisation > 0.5


def test_compaction_leaves_less_external_fragmentation(workload: lengths.Workload) -> None:
    found = compaction.run(workload, compaction.CompactionPlan(large_blocks=512, calls=50))
    assert found.external_after < found.external_before
    assert found.moves <= 64 * len(found.step_s)
    assert found.mixed_refused == 0


def test_the_unfilled_part_of_last_blocks_is_counted() -> None:
    two = lengths.Workload(name="two", requests=(lengths.Length(60, 4), lengths.Length(30, 2)))
    assert packing.last_block_loss(two, 64) == 0.25


def test_lengths_are_read_from_a_trace_in_its_order(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n2023-11-16 18:15:50,396,109\n")
    assert list(lengths.azure(path)) == [lengths.Length(374, 44), lengths.Length(396, 109)]


@pytest.mark.skipif(not TRACES.is_dir(), reason="the traces are not beside this checkout")
def test_the_traces_have_as_many_requests_as_is_known_of_them() -> None:
    assert {each.name: len(each.requests) for each in lengths.load(TRACES)} == {
        "azure": 19_366,
        "mooncake": 12_031,
        "agentic": 1_567,
    }


@pytest.mark.skipif(not TRACES.is_dir(), reason="the traces are not beside this checkout")
@pytest.mark.parametrize("block_tokens", [16, 64])
def test_blocks_lose_less_than_a_tenth_on_every_trace(block_tokens: int) -> None:
    assert all(packing.last_block_loss(each, block_tokens) < 0.1 for each in lengths.load(TRACES))
