"""The catalogue: every series of the gateway, declared once. Labels take values from small fixed sets only.

What belongs to an instance is read from the registry when Prometheus asks, so an instance that is gone leaves no
series.
"""

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.admission import AdmissionController
from gateway.registry import BreakerState, InstanceState, LoadTracker, Registry
from kvcontrol.core.ids import InstanceId
from kvcontrol.prefix_reuse import FleetIndex

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Owns its own registry: nothing global, nothing of other libraries."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own = self.registry
        self.requests = Counter(
            "kvgate_requests", "Inference requests by how they ended.", ["operation", "outcome"], registry=own
        )
        self.duration = Histogram(
            "kvgate_request_seconds",
            "From a request's arrival to the end of its answer.",
            ["operation"],
            buckets=_SECONDS,
            registry=own,
        )
        self.first_byte = Histogram(
            "kvgate_first_byte_seconds",
            "From a request's arrival to the first byte of the engine's answer; for streams, the first token.",
            ["operation"],
            buckets=_SECONDS,
            registry=own,
        )
        self.prompt_tokens = Counter("kvgate_prompt_tokens", "Prompt tokens as engines counted them.", registry=own)
        self.completion_tokens = Counter(
            "kvgate_completion_tokens", "Generated tokens as engines counted them.", registry=own
        )
        self.cached_tokens = Counter(
            "kvgate_cached_tokens", "Prompt tokens that engines report to have taken from their cache.", registry=own
        )
        self.matched_tokens = Counter(
            "kvgate_matched_tokens", "Prompt tokens that the chosen instance was known to hold.", registry=own
        )
        self.overestimated_tokens = Counter(
            "kvgate_overestimated_tokens",
            "Prompt tokens that were expected in the chosen instance's cache and not found there.",
            registry=own,
        )
        self.ttft_predicted = Histogram(
            "kvgate_ttft_predicted_seconds",
            "Predicted time from sending a stream's request to its first token.",
            buckets=_SECONDS,
            registry=own,
        )
        self.ttft_real = Histogram(
            "kvgate_ttft_real_seconds",
            "What it was, of the same requests.",
            buckets=_SECONDS,
            registry=own,
        )
        self.ttft_error = Histogram(
            "kvgate_ttft_error_seconds",
            "How far the prediction was off, either way.",
            buckets=_SECONDS,
            registry=own,
        )
        self.routing = Counter(
            "kvgate_routing_decisions",
            "Routing decisions by policy, what decided, and why.",
            ["policy", "basis", "reason"],
            registry=own,
        )
        self.shed = Counter(
            "kvgate_shed_requests", "Requests refused before they were sent anywhere.", ["reason"], registry=own
        )
        self.queue_wait = Histogram(
            "kvgate_queue_seconds",
            "How long requests that were let in had waited for their turn.",
            buckets=_SECONDS,
            registry=own,
        )
        self.retries = Counter("kvgate_retries", "Requests tried again on another instance.", ["cause"], registry=own)
        self.events = Counter("kvgate_kv_events", "KV events taken in.", ["instance"], registry=own)
        self.undecodable = Counter(
            "kvgate_kv_events_undecodable",
            "KV events, batches and snapshots that could not be read: each makes a new snapshot necessary.",
            ["instance"],
            registry=own,
        )
        self.resyncs = Counter(
            "kvgate_kv_resyncs",
            "Times an instance's residency was repaired, by what made it necessary.",
            ["instance", "reason"],
            registry=own,
        )
        self.loop_failures = Counter(
            "kvgate_background_failures", "Failures of background loops; they start again.", ["loop"], registry=own
        )

    def watch(self, registry: Registry, load: LoadTracker, index: FleetIndex, admission: AdmissionController) -> None:
        """Add what is read from the live objects at each scrape."""
        self.registry.register(_Fleet(registry, load, index, admission))

    def forget(self, instance: InstanceId) -> None:
        """Drop what is counted for an instance."""
        for series in (self.events, self.undecodable):
            series.remove_by_labels({"instance": instance})
        self.resyncs.remove_by_labels({"instance": instance})

    def exposition(self) -> bytes:
        """Return all series as Prometheus text."""
        return generate_latest(self.registry)


class _Fleet(Collector):
    def __init__(
        self, registry: Registry, load: LoadTracker, index: FleetIndex, admission: AdmissionController
    ) -> None:
        self._admission = admission
        self._registry = registry
        self._load = load
        self._index = index

    def collect(self) -> Iterable[Metric]:
        state = GaugeMetricFamily(
            "kvgate_instance_state", "1 for the state an instance is in.", labels=["instance", "state"]
        )
        draining = GaugeMetricFamily(
            "kvgate_instance_draining", "1 for an instance that is given nothing new.", labels=["instance"]
        )
        breaker = GaugeMetricFamily(
            "kvgate_instance_breaker", "1 for the state an instance's breaker is in.", labels=["instance", "state"]
        )
        in_flight = GaugeMetricFamily(
            "kvgate_requests_in_flight", "Requests of this gateway at an instance.", labels=["instance"]
        )
        resident = GaugeMetricFamily(
            "kvgate_resident_blocks", "KV blocks that an instance is known to hold.", labels=["instance", "tier"]
        )
        limit = GaugeMetricFamily(
            "kvgate_instance_request_limit", "Requests that an instance is given at once.", labels=["instance"]
        )
        waiting = GaugeMetricFamily("kvgate_requests_waiting", "Requests that wait for their turn.")
        waiting.add_metric([], self._admission.waiting)
        tasks = GaugeMetricFamily("kvgate_tasks", "Tasks on this process's event loop.")
        with suppress(RuntimeError):  # asked outside the loop there is nothing to count
            tasks.add_metric([], len(asyncio.all_tasks()))
        for each in self._registry.all():
            limit.add_metric([each.id], self._admission.limit(each))
            for possible in InstanceState:
                state.add_metric([each.id, possible], float(each.state is possible))
            draining.add_metric([each.id], float(each.draining))
            for setting in BreakerState:
                breaker.add_metric([each.id, setting], float(self._registry.breaker(each.id) is setting))
            in_flight.add_metric([each.id], self._load.of(each.id).in_flight)
            for tier, blocks in self._index.blocks_held(each.id).items():
                resident.add_metric([each.id, tier], blocks)
        return state, draining, breaker, in_flight, resident, limit, waiting, tasks


__all__ = ["Metrics"]
