"""``/metrics`` of a simulated instance: our series, and those of LMDeploy's that dashboards read."""

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engines.control.families import family, single
from engines.control.policy_metrics import policy_series
from engines.control.tier_metrics import offload_series, tenant_series, tier_series
from engines.sim.instance import SimInstance
from engines.sim.report import offload_stats, tier_counts, tier_stats
from kvcontrol.series.engine import process as catalogue

_TTFT_S: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_GAP_S: Final = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class SimMetrics(Collector):
    """One instance's registry; ``first_token`` and ``gap`` are told by who serves answers."""

    def __init__(self, instance: SimInstance) -> None:
        self._instance = instance
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._ttft = self._histogram("time_to_first_token_seconds", "Seconds to the first token.", _TTFT_S)
        self._gap = self._histogram("iter_token_latency", "Seconds between two tokens of one answer.", _GAP_S)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(f"lmdeploy:{name}", text, labelnames=("model_name",), registry=self._registry, buckets=buckets)
        return made.labels(self._instance.spec.model)

    def first_token(self, seconds: float) -> None:
        """Count one answer's beginning."""
        self._ttft.observe(seconds)

    def gap(self, seconds: float) -> None:
        """Count one pause between two tokens."""
        self._gap.observe(seconds)

    def exposition(self) -> bytes:
        """Return Prometheus' text."""
        return generate_latest(self._registry)

    def describe(self) -> Iterator[Metric]:
        """Nothing is known before it is asked for."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield one family after the other."""
        instance = self._instance
        engine, log = instance.engine, instance.publisher.log
        counters = log.counters()
        yield single(catalogue.UP, 1)
        yield family(
            catalogue.RESIDENT_BLOCKS, (((tier.value,), blocks) for tier, blocks in log.resident_blocks().items())
        )
        kinds = (("stored", counters.stored), ("removed", counters.removed), ("cleared", counters.cleared))
        yield family(catalogue.KV_EVENTS, (((kind,), total) for kind, total in kinds))
        for series, value in (
            (catalogue.KV_EVENTS_SEQ, counters.seq),
            (catalogue.KV_EVENTS_DROPPED, counters.dropped),
            (catalogue.KV_EVENTS_RESYNCS, counters.resyncs),
            (catalogue.HOOK_ERRORS, 0),
            (catalogue.EVICTION_ERRORS, 0),
            (catalogue.PUBLISHER_ERRORS, instance.publisher.errors),
        ):
            yield single(series, value)
        pinned = instance.pins.counts()
        yield family(catalogue.PINNED_BLOCKS, (((tier.value,), blocks) for tier, blocks in pinned.items()))
        counts = tier_counts(engine)
        yield from tier_series(tier_stats(engine), counts)
        if engine.tiers is not None:
            yield from tenant_series(counts)
            yield from offload_series(offload_stats(engine.tiers))
        yield from policy_series(instance.policies.report(), instance.policies.refused)
        yield from self._as_lmdeploy()

    def _as_lmdeploy(self) -> Iterator[Metric]:
        engine, model = self._instance.engine, self._instance.spec.model
        for name, text, value in (
            ("num_requests_running", "Requests in the engine's batch.", engine.running),
            ("num_requests_waiting", "Requests that wait in the engine.", engine.waiting),
            (
                "gpu_cache_usage_perc",
                "Share of the engine's KV pool in use.",
                engine.pool.used_blocks / engine.pool.capacity_blocks,
            ),
        ):
            gauge = GaugeMetricFamily(f"lmdeploy:{name}", text, labels=("model_name",))
            gauge.add_metric((model,), value)
            yield gauge
        for name, text, total in (
            ("prompt_tokens", "Prompt tokens.", engine.counters.query_tokens),
            ("generation_tokens", "Generated tokens.", engine.counters.generated_tokens),
        ):
            counter = CounterMetricFamily(f"lmdeploy:{name}", text, labels=("model_name",))
            counter.add_metric((model,), total)
            yield counter
