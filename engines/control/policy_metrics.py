"""The policies' series on an instance's ``/metrics``; the counts come from the engine process."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from engines.control.families import family, single
from engines.control.pace_metrics import pace_series
from engines.control.schedule_metrics import schedule_series
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.policy_control import EvictionReport, PolicyReport, ShadowBody
from kvcontrol.series.engine import policies as catalogue


def policy_series(report: PolicyReport, refused: int) -> Iterator[Metric]:
    """Yield one family after the other. Counters go on when a policy is swapped: hit rates have no seam."""
    evictions = [(each, each.eviction) for each in report.policies if each.eviction is not None]
    schedules = [(each, each.schedule) for each in report.policies if each.schedule is not None]
    swaps = [(("eviction", each.tier.value), each.swaps) for _, each in evictions]
    swaps += [(("schedule", ""), each.swaps) for _, each in schedules]
    swaps += [(("pace", ""), each.pace.swaps) for each in report.policies if each.pace is not None]
    yield family(catalogue.POLICY_SWAPS, swaps)
    yield family(catalogue.POLICY_EVICTED, (((each.tier.value,), each.evicted_blocks) for _, each in evictions))
    yield family(catalogue.POLICY_IN_CHARGE, (((each.tier.value, policy.name), 1) for policy, each in evictions))
    yield single(catalogue.POLICY_REFUSED, refused)
    for _, each in evictions:
        if each.tier is CacheTier.HBM:
            yield from _hbm_series(each)
    for policy in report.policies:
        if policy.shadow is not None:
            yield from _shadow_series(policy.shadow)
    for policy, schedule in schedules:
        yield from schedule_series(policy.name, schedule)
    for policy in report.policies:
        if policy.pace is not None:
            yield from pace_series(policy.name, policy.pace)


def _hbm_series(hbm: EvictionReport) -> Iterator[Metric]:
    yield single(catalogue.PREFIX_QUERY, hbm.query or 0)
    yield single(catalogue.PREFIX_HIT, hbm.hit)
    if hbm.adaptive is not None:
        adaptive = hbm.adaptive
        yield single(catalogue.ADAPTIVE_WEIGHT, float("inf") if adaptive.follows is None else adaptive.follows)
        yield single(catalogue.ADAPTIVE_HITS, adaptive.hits)
        yield single(catalogue.ADAPTIVE_LRU_HITS, adaptive.lru_hits)
        yield single(catalogue.ADAPTIVE_SWITCHES, adaptive.switches)


def _shadow_series(shadow: ShadowBody) -> Iterator[Metric]:
    standings = shadow.standings
    yield family(catalogue.SHADOW_LOOKUPS, (((each.policy,), each.lookups) for each in standings))
    yield family(catalogue.SHADOW_HITS, (((each.policy,), each.hits) for each in standings))
    yield family(
        catalogue.SHADOW_RATIO,
        (((each.policy,), each.window_hit_ratio) for each in standings if each.window_hit_ratio is not None),
    )
    yield single(catalogue.SHADOW_REQUESTS, shadow.requests)
    yield single(catalogue.SHADOW_SKIPPED, shadow.skipped_requests)
    yield single(catalogue.SHADOW_BUSY, shadow.busy_s)
