"""The tiers' series on an instance's ``/metrics``; the counts come from the engine process."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.control import OffloadStats, TierStats


def tier_series(tiers: Mapping[CacheTier, TierStats], offload: OffloadStats) -> Iterator[Metric]:
    """Yield one family after the other."""
    capacity = GaugeMetricFamily(
        "kvgate_engine_tier_capacity_blocks", "KV blocks that a tier can hold", labels=["tier"]
    )
    used = GaugeMetricFamily("kvgate_engine_tier_used_blocks", "KV blocks that take room in a tier", labels=["tier"])
    for tier, stats in tiers.items():
        capacity.add_metric([tier.value], stats.capacity_blocks)
        used.add_metric([tier.value], stats.used_blocks)
    yield from (capacity, used)
    for name, text, total in (
        ("offload_loads", "Requests restored from below HBM", offload.loads),
        ("offload_failed_loads", "Requests whose restore failed and were computed", offload.failed_loads),
        ("offload_declined_loads", "Restores that computing was expected to beat", offload.declined_loads),
        ("offload_saves", "Paths of blocks given to the tiers", offload.saves),
        ("offload_tail_saves", "Those at the end of a request, with decoded blocks", offload.tail_saves),
        ("offload_looked_up_tokens", "Prompt tokens that HBM did not hold, looked up below", offload.looked_up_tokens),
        ("offload_found_tokens", "Those that were found", offload.found_tokens),
        ("offload_collisions", "Blocks whose hash was equal and whose tokens were not", offload.collisions),
        ("offload_guard_errors", "Failures of the connector, kept from the engine's loop", offload.guard_errors),
        ("offload_worker_faults", "Failures of transfer workers", offload.worker_faults),
    ):
        yield CounterMetricFamily(f"kvgate_engine_{name}", text, value=total)
    for name, text, value in (
        ("prefill_tokens_per_second", "Measured speed of computing, 0 before", offload.prefill_tokens_per_s),
        ("offload_lookup_p50_seconds", "Median time of a look-up below HBM, 0 before", offload.lookup_p50_s),
        ("offload_lookup_p99_seconds", "99th percentile of the same", offload.lookup_p99_s),
    ):
        yield GaugeMetricFamily(f"kvgate_engine_{name}", text, value=value)
    blocks = CounterMetricFamily(
        "kvgate_engine_offload_blocks",
        "KV blocks by what was asked and how it ended",
        labels=["operation", "status", "reason"],
    )
    for name, total in offload.outcomes.items():
        blocks.add_metric(name.split(":"), total)
    losses = CounterMetricFamily(
        "kvgate_engine_tier_lost_blocks", "KV blocks that left a tier, by reason", labels=["tier", "reason"]
    )
    for name, total in offload.losses.items():
        losses.add_metric(name.split(":"), total)
    moved = CounterMetricFamily("kvgate_engine_path_moved_bytes", "Bytes moved between two tiers", labels=["path"])
    failed = CounterMetricFamily(
        "kvgate_engine_path_failed_blocks", "KV blocks that a path failed to move", labels=["path"]
    )
    queued = GaugeMetricFamily("kvgate_engine_path_queued_blocks", "KV blocks that wait for a path", labels=["path"])
    speed = GaugeMetricFamily(
        "kvgate_engine_path_bytes_per_second", "Measured bandwidth of a path, 0 before", labels=["path"]
    )
    for path, each in offload.paths.items():
        moved.add_metric([path], each.moved_bytes)
        failed.add_metric([path], each.failed_blocks)
        queued.add_metric([path], each.queued_blocks)
        speed.add_metric([path], each.bandwidth_bytes_per_s)
    yield from (blocks, losses, moved, failed, queued, speed)
    yield from _cost_series(offload)


def _cost_series(offload: OffloadStats) -> Iterator[Metric]:
    predictions = CounterMetricFamily(
        "kvgate_engine_cost_predictions", "Predicted seconds whose outcome was seen", labels=["quantity"]
    )
    error = GaugeMetricFamily(
        "kvgate_engine_cost_relative_error",
        "|predicted - actual| / actual of the cost model's seconds, a fading average; 0 before",
        labels=["quantity"],
    )
    bias = GaugeMetricFamily(
        "kvgate_engine_cost_bias_ratio", "(predicted - actual) / actual, likewise", labels=["quantity"]
    )
    for quantity, each in offload.predictions.items():
        predictions.add_metric([quantity], each.predictions)
        error.add_metric([quantity], each.relative_error)
        bias.add_metric([quantity], each.bias)
    judged = CounterMetricFamily(
        "kvgate_engine_migration_judged_blocks",
        "KV blocks whose way down a path was judged: worth it, not worth it, and declined therefore",
        labels=["path", "verdict"],
    )
    benefit = GaugeMetricFamily(
        "kvgate_engine_migration_net_benefit_seconds",
        "Seconds that the moves made so far are expected to save, less what they cost",
        labels=["path"],
    )
    for path, made in offload.benefits.items():
        judged.add_metric([path, "worth"], made.worth_blocks)
        judged.add_metric([path, "not_worth"], made.not_worth_blocks)
        judged.add_metric([path, "declined"], made.declined_blocks)
        benefit.add_metric([path], made.net_benefit_s)
    break_even = GaugeMetricFamily(
        "kvgate_engine_load_break_even_blocks",
        "Blocks from which on a load from a tier beats computing, -1 where it never does",
        labels=["tier"],
    )
    for tier, count in offload.break_even_blocks.items():
        break_even.add_metric([tier.value], count)
    prefetches = CounterMetricFamily(
        "kvgate_engine_prefetch_blocks",
        "KV blocks brought up from NVMe before a request came, and what became of them",
        labels=["outcome"],
    )
    for outcome, count in offload.prefetches.items():
        prefetches.add_metric([outcome], count)
    yield prefetches
    yield from (predictions, error, bias, judged, benefit, break_even)


__all__ = ["tier_series"]
