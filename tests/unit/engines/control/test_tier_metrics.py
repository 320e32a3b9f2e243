"""What the tiers did is on the instance's ``/metrics``, under fixed names."""

import msgspec
import pytest
from prometheus_client.core import CollectorRegistry
from prometheus_client.registry import Collector

from engines.control.tier_metrics import (
    TenantCounts,
    TierCounts,
    bounded,
    offload_series,
    tenant_series,
    tier_series,
)
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.control import BenefitStats, OffloadStats, PathStats, PredictionStats, TierStats
from kvcontrol.prefix_reuse import PrefixReuseMetrics
from kvcontrol.series import MOST_TENANTS, OTHER

TIERS = {CacheTier.DDR: TierStats(capacity_blocks=10, used_blocks=4, cached_blocks=3, block_bytes=64)}


def tenant(used_bytes: int, *, guaranteed_bytes: int = 0, burst_bytes: int | None = None) -> TenantCounts:
    return TenantCounts(
        used_bytes=used_bytes,
        guaranteed_bytes=guaranteed_bytes,
        burst_bytes=burst_bytes,
        over_burst_blocks=2,
        hit_blocks=3,
    )


COUNTS = {
    CacheTier.DDR: TierCounts(
        hit_tokens=192, fragmentation_ratio=0.25, tenants={"ab12": tenant(128, burst_bytes=256), "shared": tenant(64)}
    )
}


def offload(metrics: PrefixReuseMetrics) -> OffloadStats:
    reuse = metrics.report()
    return OffloadStats(
        loads=5,
        failed_loads=1,
        declined_loads=2,
        saves=6,
        tail_saves=3,
        looked_up_tokens=reuse.looked_up_tokens,
        found_tokens=reuse.hit_tokens,
        collisions=reuse.collisions,
        prefill_tokens_per_s=1_000.0,
        outcomes={"save:done:": 7},
        losses={"DDR:evicted": 8},
        paths={
            "hbm_to_ddr": PathStats(
                moved_blocks=1, moved_bytes=64, failed_blocks=0, queued_blocks=0, bandwidth_bytes_per_s=9.0
            )
        },
        guard_errors=0,
        worker_faults=0,
        lookup_p50_s=reuse.lookup_p50_s,
        lookup_p99_s=reuse.lookup_p99_s,
        predictions={"load": PredictionStats(predictions=4, relative_error=0.5, bias=-0.5)},
        benefits={
            "ddr_to_nvme": BenefitStats(worth_blocks=9, not_worth_blocks=3, declined_blocks=2, net_benefit_s=1.5)
        },
        prefetches={"prefetched": 8, "used": 5, "wasted": 2},
        break_even_blocks={CacheTier.DDR: 1.0, CacheTier.NVME: -1.0},
    )


def exported(stats: OffloadStats) -> CollectorRegistry:
    class Tiers(Collector):
        def collect(self):  # type: ignore[no-untyped-def]  # noqa: ANN202 - the type is prometheus_client's
            yield from tier_series(TIERS, COUNTS)
            yield from tenant_series(COUNTS)
            yield from offload_series(stats)

    registry = CollectorRegistry()
    registry.register(Tiers())
    return registry


def test_how_long_look_ups_take_is_on_metrics() -> None:
    metrics = PrefixReuseMetrics()
    for place in range(100):
        took_s = 1e-3 if place >= 98 else 1e-5
        metrics.looked_up(blocks=4, matched_blocks=2, tokens=16, matched_tokens=8, took_s=took_s)
    registry = exported(offload(metrics))
    assert registry.get_sample_value("kvgate_engine_offload_lookup_p50_seconds") == pytest.approx(1e-5, rel=0.1)
    assert registry.get_sample_value("kvgate_engine_offload_lookup_p99_seconds") == pytest.approx(1e-3, rel=0.1)
    assert registry.get_sample_value("kvgate_engine_offload_looked_up_tokens_total") == 1_600
    assert registry.get_sample_value("kvgate_engine_offload_found_tokens_total") == 800


def test_before_the_first_look_up_its_time_is_0() -> None:
    registry = exported(offload(PrefixReuseMetrics()))
    assert registry.get_sample_value("kvgate_engine_offload_lookup_p50_seconds") == 0.0
    assert registry.get_sample_value("kvgate_engine_offload_lookup_p99_seconds") == 0.0


def test_tiers_paths_and_outcomes_are_told_apart_by_labels() -> None:
    registry = exported(offload(PrefixReuseMetrics()))
    value = registry.get_sample_value
    assert value("kvgate_engine_tier_used_blocks", {"tier": "DDR"}) == 4
    assert value("kvgate_engine_path_moved_bytes_total", {"path": "hbm_to_ddr"}) == 64
    assert value("kvgate_engine_offload_blocks_total", {"operation": "save", "status": "done", "reason": ""}) == 7
    assert value("kvgate_engine_tier_lost_blocks_total", {"tier": "DDR", "reason": "evicted"}) == 8


def test_stats_of_an_engine_that_does_not_tell_the_times_are_read() -> None:
    older = msgspec.to_builtins(offload(PrefixReuseMetrics()))
    del older["lookup_p50_s"], older["lookup_p99_s"]
    assert msgspec.convert(older, OffloadStats) == offload(PrefixReuseMetrics())


def test_what_the_cost_model_expects_and_how_wrong_it_was_are_on_metrics() -> None:
    registry = exported(offload(PrefixReuseMetrics()))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"kvgate_engine_{name}", labels)

    assert value("cost_predictions_total", quantity="load") == 4
    assert value("cost_relative_error", quantity="load") == 0.5
    assert value("cost_bias_ratio", quantity="load") == -0.5
    assert value("migration_judged_blocks_total", path="ddr_to_nvme", verdict="worth") == 9
    assert value("migration_judged_blocks_total", path="ddr_to_nvme", verdict="declined") == 2
    assert value("migration_net_benefit_seconds", path="ddr_to_nvme") == 1.5
    assert value("load_break_even_blocks", tier="DDR") == 1
    assert value("prefetch_blocks_total", outcome="used") == 5
    assert value("load_break_even_blocks", tier="NVME") == -1


def test_what_tenants_have_in_a_tier_and_what_their_quotas_cost_them_is_on_metrics() -> None:
    value = exported(offload(PrefixReuseMetrics())).get_sample_value
    assert value("kvgate_engine_tier_hit_tokens_total", {"tier": "DDR"}) == 192
    assert value("kvgate_engine_tier_fragmentation_ratio", {"tier": "DDR"}) == 0.25
    mine = {"tier": "DDR", "tenant": "ab12"}
    assert value("kvgate_engine_tenant_used_bytes", mine) == 128
    assert value("kvgate_engine_tenant_burst_bytes", mine) == 256
    assert value("kvgate_engine_tenant_over_burst_blocks_total", mine) == 2
    assert value("kvgate_engine_tenant_burst_bytes", {"tier": "DDR", "tenant": "shared"}) is None


def test_only_so_many_tenants_have_series_of_their_own_and_guaranteed_ones_come_first() -> None:
    many = {f"t{place}": tenant(place) for place in range(MOST_TENANTS + 50)}
    many["t0"] = tenant(0, guaranteed_bytes=64)
    kept = bounded(many)
    assert len(kept) == MOST_TENANTS + 1
    assert {"t0", f"t{MOST_TENANTS + 49}", OTHER} <= kept.keys()
    assert "t1" not in kept
    assert kept[OTHER].used_bytes == sum(range(1, 51))
    assert sum(each.hit_blocks for each in kept.values()) == sum(each.hit_blocks for each in many.values())
