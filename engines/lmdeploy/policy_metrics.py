"""The policies' series on an instance's ``/metrics``; the counts come from the engine process."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.policy_control import EvictionReport, PolicyReport, ShadowBody


def policy_series(report: PolicyReport, refused: int) -> Iterator[Metric]:
    """Yield one family after the other. Counters go on when a policy is exchanged: hit rates have no seam."""
    swaps = CounterMetricFamily(
        "kv_policy_swaps", "Policies exchanged in the running instance", labels=["kind", "tier"]
    )
    evicted = CounterMetricFamily(
        "kvgate_engine_policy_evicted_blocks", "KV blocks that a policy chose", labels=["tier"]
    )
    charge = GaugeMetricFamily(
        "kvgate_engine_policy_in_charge", "1 for the policy that chooses what leaves a tier", labels=["tier", "policy"]
    )
    evictions = [(each, each.eviction) for each in report.policies if each.eviction is not None]
    for policy, each in evictions:
        swaps.add_metric(["eviction", each.tier.value], each.swaps)
        evicted.add_metric([each.tier.value], each.evicted_blocks)
        charge.add_metric([each.tier.value, policy.name], 1)
    yield from (swaps, evicted, charge)
    yield CounterMetricFamily("kv_policy_refused_swaps", "Changes of policy that were refused", value=refused)
    for _, each in evictions:
        if each.tier is CacheTier.HBM:
            yield from _hbm_series(each)
    for policy in report.policies:
        if policy.shadow is not None:
            yield from _shadow_series(policy.shadow)


def _hbm_series(hbm: EvictionReport) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "kvgate_engine_prefix_query_tokens", "Prompt tokens looked up in HBM", value=hbm.query or 0
    )
    yield CounterMetricFamily("kvgate_engine_prefix_hit_tokens", "Those that were found", value=hbm.hit)
    if hbm.adaptive is not None:
        adaptive = hbm.adaptive
        yield GaugeMetricFamily(
            "kvgate_engine_adaptive_weight",
            "How many times as slowly blocks that came again age; 1 is LRU",
            value=float("inf") if adaptive.follows is None else adaptive.follows,
        )
        for name, text, value in (
            ("adaptive_hits", "Uses of resident blocks that the guard follows", adaptive.hits),
            ("adaptive_lru_hits", "Those that an LRU cache would have had", adaptive.lru_hits),
            ("adaptive_switches", "Changes of the weight", adaptive.switches),
        ):
            yield CounterMetricFamily(f"kvgate_engine_{name}", text, value=value)


def _shadow_series(shadow: ShadowBody) -> Iterator[Metric]:
    lookups = CounterMetricFamily(
        "kvgate_engine_shadow_lookups", "Sampled blocks that a shadow policy was asked for", labels=["policy"]
    )
    hits = CounterMetricFamily("kvgate_engine_shadow_hits", "Those that it would have found", labels=["policy"])
    ratio = GaugeMetricFamily(
        "kvgate_engine_shadow_hit_ratio", "Share that it would have found in the last whole window", labels=["policy"]
    )
    for standing in shadow.standings:
        lookups.add_metric([standing.policy], standing.lookups)
        hits.add_metric([standing.policy], standing.hits)
        if standing.window_hit_ratio is not None:
            ratio.add_metric([standing.policy], standing.window_hit_ratio)
    yield from (lookups, hits, ratio)
    for name, text, total in (
        ("shadow_requests", "Requests that shadow policies followed", shadow.requests),
        (
            "shadow_skipped",
            "Requests and stores that they left out to stay below 1 % of a core",
            shadow.skipped_requests,
        ),
        ("shadow_busy_seconds", "Time of the engine's thread that they took", shadow.busy_s),
    ):
        yield CounterMetricFamily(f"kvgate_engine_{name}", text, value=total)


__all__ = ["policy_series"]
