"""What lies below HBM comes back over links that take their time, or is computed again."""

from dataclasses import replace

import pytest

from engines.sim.behaviour import Behaviour
from engines.sim.engine import SimEngine
from engines.sim.report import offload_stats
from engines.sim.sequence import SimSequence
from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_runtime import Loss
from tests.support.simulated import BLOCK, TIME, Listening, Mirror, engine, request, run, small_profile


def revisited(tiered: SimEngine) -> SimSequence:
    """A prompt that comes again after others have pushed it out of HBM."""
    run(tiered, [(0.0, request("a", range(30)))])
    run(
        tiered,
        [(100.0 + number, request(f"flood {number}", range(100 * number, 100 * number + 30))) for number in (1, 2, 3)],
    )
    (again,) = run(tiered, [(1000.0, request("a again", range(30)))])
    tiered.check_integrity()
    return again


def test_what_was_pushed_out_is_loaded_from_ddr_in_the_links_time() -> None:
    mirror = Mirror()
    tiered = engine(Listening(), sink=mirror, ddr_blocks=200)
    again = revisited(tiered)
    assert again.cached_by_tier == {CacheTier.DDR: 30 * BLOCK}
    assert again.cached_tokens == 30 * BLOCK
    assert again.first_token_s == pytest.approx(1000.0 + 30 * 100 / 1e6 + TIME.prompt_s(1, 30 * BLOCK, 32))
    assert tiered.tiers is not None
    assert tiered.tiers.counters.loads == 1
    assert len(mirror.held[CacheTier.DDR]) == 120
    tiered.close()


def test_what_left_ddr_too_is_loaded_from_nvme() -> None:
    tiered = engine(Listening(), ddr_blocks=40, nvme_blocks=400)
    again = revisited(tiered)
    assert again.cached_by_tier[CacheTier.NVME] > 0
    assert again.cached_tokens == 30 * BLOCK
    tiered.close()


def test_a_link_that_is_slower_than_computing_is_left_alone_once_it_was_measured() -> None:
    profile = small_profile(ddr_blocks=400)
    links = replace(profile.links, ddr_to_hbm_bytes_per_s=500.0)
    tiered = engine(Listening(), profile=replace(profile, links=links))
    first = revisited(tiered)  # a try, which measures
    assert first.first_token_s is not None
    assert first.first_token_s > 1000.0 + 30 * 100 / 500.0
    again, other = run(
        tiered, [(2000.0, request("again", range(100, 130))), (2000.1, request("other", range(200, 230)))]
    )
    assert again.cached_by_tier[CacheTier.DDR] > 0
    assert CacheTier.DDR not in other.cached_by_tier
    assert tiered.tiers is not None
    assert tiered.tiers.agent.declined == 1
    tiered.close()


def test_blocks_that_come_wrong_are_computed_again() -> None:
    tiered = engine(Listening(), ddr_blocks=200, behaviour=Behaviour(corrupt_share=1.0))
    assert tiered.tiers is not None
    before = offload_stats(tiered.tiers).losses
    assert before == {f"DDR:{loss}": 0 for loss in Loss}, "an alert sees the first loss only if there was a 0 before it"
    again = revisited(tiered)
    assert offload_stats(tiered.tiers).losses["DDR:corrupt"] > 0
    assert again.cached_tokens == 0
    assert again.generated == 1
    assert tiered.tiers.counters.failed_loads == 1
    tiered.close()


def test_two_loads_share_a_link() -> None:
    def second_alone(*, other: bool) -> float:
        tiered = engine(Listening(), ddr_blocks=400, hbm_blocks=80)
        for number in range(4):
            run(tiered, [(50.0 * number, request(str(number), range(100 * number, 100 * number + 38)))])
        if other:
            tiered.submit(request("other", range(38)), 1000.0)
        sequence = tiered.submit(request("it", range(100, 138)), 1000.0)
        while not tiered.idle:
            tiered.advance(tiered.next_event_s)
        tiered.close()
        assert sequence.cached_tokens == 38 * BLOCK
        return (sequence.first_token_s or 0.0) - 1000.0

    assert second_alone(other=True) > second_alone(other=False)
