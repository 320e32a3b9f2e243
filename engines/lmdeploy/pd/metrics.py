"""Prompts that change hands, on an instance's ``/metrics``; the counts come from the engine process."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from engines.control.families import family, single
from kvcontrol.core.pd import PdStats
from kvcontrol.series.engine import handovers as catalogue


def pd_series(stats: PdStats) -> Iterator[Metric]:
    """Yield one family after the other."""
    outcomes = {
        "handed_over": stats.handed_over,
        "expired": stats.expired,
        "released": stats.released,
        "fetched": stats.fetched,
        "recomputed": sum(stats.recomputed.values()),
    }
    yield family(catalogue.HANDOVERS, (((name,), count) for name, count in outcomes.items()))
    yield family(catalogue.HANDOVERS_RECOMPUTED, (((why,), count) for why, count in stats.recomputed.items()))
    yield single(catalogue.HANDOVER_BYTES, stats.fetched_bytes)
    yield single(catalogue.HANDOVER_SECONDS, stats.transfer_s)
    yield single(catalogue.HELD_PROMPTS, stats.held_requests)
    yield single(catalogue.HELD_BLOCKS, stats.held_blocks)
