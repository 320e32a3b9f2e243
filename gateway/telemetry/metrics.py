"""Counters of the gateway. ``kvcontrol.series.gateway`` has their names and descriptions.

What belongs to an instance is read from the registry when Prometheus asks, so an instance that is gone leaves no
series. What belongs to tenants is counted for those that are known by name.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from gateway.admission import AdmissionController
from gateway.problems import Problems
from gateway.registry import BreakerState, InstanceState, LoadTracker, Registry
from gateway.telemetry.meters import CounterMeter, HistogramMeter, Labels, family_of, gauge_of
from gateway.types import Tenant, TenantId
from gateway.version import installed_version
from kvcontrol.core.ids import InstanceId
from kvcontrol.core.tenant import tenant_of_salt
from kvcontrol.prefix_reuse import FleetIndex
from kvcontrol.series import MOST_MODELS, OTHER
from kvcontrol.series import gateway as catalogue

if TYPE_CHECKING:
    from kvcontrol.tracing.outlet import SpanCounts

_QUOTAS: Final = ("requests_per_min", "tokens_per_min", "concurrency", "context_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What is read at each scrape."""

    registry: Registry
    load: LoadTracker
    index: FleetIndex
    admission: AdmissionController
    problems: Problems
    accounts: Callable[[], Mapping[TenantId, Tenant]]
    """Tenants that are known by name: those alone have series of their own."""
    spans: "SpanCounts | None" = None
    """What became of spans, where traces are made."""


class Metrics:
    """Owns its own registry: nothing global, nothing of other libraries but what the process costs."""

    def __init__(self) -> None:
        self.requests = CounterMeter(catalogue.REQUESTS)
        self.model_requests = CounterMeter(catalogue.MODEL_REQUESTS)
        self.duration = HistogramMeter(catalogue.DURATION)
        self.first_byte = HistogramMeter(catalogue.FIRST_BYTE)
        self.time_per_token = HistogramMeter(catalogue.TIME_PER_TOKEN)
        self.between_tokens = HistogramMeter(catalogue.BETWEEN_TOKENS)
        self.stage = HistogramMeter(catalogue.STAGE)
        self.queue_wait = HistogramMeter(catalogue.QUEUE_WAIT)
        self.shed = CounterMeter(catalogue.SHED)
        self.retries = CounterMeter(catalogue.RETRIES)
        self.prompt_tokens = CounterMeter(catalogue.PROMPT_TOKENS)
        self.completion_tokens = CounterMeter(catalogue.COMPLETION_TOKENS)
        self.cached_tokens = CounterMeter(catalogue.CACHED_TOKENS)
        self.matched_tokens = CounterMeter(catalogue.MATCHED_TOKENS)
        self.matched_tier_tokens = CounterMeter(catalogue.MATCHED_TIER_TOKENS)
        self.overestimated_tokens = CounterMeter(catalogue.OVERESTIMATED_TOKENS)
        self.routing = CounterMeter(catalogue.ROUTING)
        self.separations = CounterMeter(catalogue.SEPARATIONS)
        self.separated_prefill = HistogramMeter(catalogue.SEPARATED_PREFILL)
        self.ttft_predicted = HistogramMeter(catalogue.TTFT_PREDICTED)
        self.ttft_real = HistogramMeter(catalogue.TTFT_REAL)
        self.ttft_error = HistogramMeter(catalogue.TTFT_ERROR)
        self.tenant_requests = CounterMeter(catalogue.TENANT_REQUESTS)
        self.tenant_tokens = CounterMeter(catalogue.TENANT_TOKENS)
        self.events = CounterMeter(catalogue.KV_EVENTS)
        self.undecodable = CounterMeter(catalogue.KV_EVENTS_UNDECODABLE)
        self.resyncs = CounterMeter(catalogue.KV_RESYNCS)
        self.loop_failures = CounterMeter(catalogue.BACKGROUND_FAILURES)
        self.loop_lag = HistogramMeter(catalogue.LOOP_LAG)
        self._models: set[str] = set()
        self._watched: Watched | None = None
        self.registry = CollectorRegistry()
        self.registry.register(_Own(self._families))
        ProcessCollector(registry=self.registry)

    def watch(self, watched: Watched) -> None:
        """Add what is read from the live objects at each scrape."""
        self._watched = watched

    def tenant(self, tenant: TenantId | None) -> str:
        """Return what a tenant is called here: its name where that is known, ``other`` for the rest."""
        if self._watched is None or tenant is None:
            return OTHER
        return tenant if tenant in self._watched.accounts() else OTHER

    def model(self, model: str | None) -> str:
        """Return what a model that is served is called here: its name, ``other`` once there are too many."""
        if model is None:
            return OTHER
        if model not in self._models:
            if len(self._models) >= MOST_MODELS:
                return OTHER
            self._models.add(model)
        return model

    def forget(self, instance: InstanceId) -> None:
        """Drop what is counted for an instance."""
        for series in (self.events, self.undecodable, self.resyncs):
            series.forget("instance", instance)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Return all series, and their content type: OpenMetrics for who asks for it, otherwise Prometheus text."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def _families(self) -> Iterator[Metric]:
        if self._watched is not None:
            self._drop(self._watched)
        for each in vars(self).values():
            if isinstance(each, CounterMeter | HistogramMeter):
                yield each.family()
        yield gauge_of(catalogue.BUILD_INFO, iter([((installed_version(),), 1)]))
        with suppress(RuntimeError):  # asked outside the loop there is nothing to count
            yield gauge_of(catalogue.TASKS, iter([((), len(asyncio.all_tasks()))]))
        if self._watched is not None:
            yield from _fleet(self._watched)
            yield from _tenants(self._watched.accounts())
            counts = self._watched.problems.counts()
            yield gauge_of(catalogue.PROBLEMS, (((kind,), count) for kind, count in counts.items()))
            if self._watched.spans is not None:
                yield _spans(self._watched.spans)

    def _drop(self, watched: Watched) -> None:
        """Forget the series of tenants that are gone, and of models that nobody serves any more."""
        tenants = {OTHER, *watched.accounts()}
        self.tenant_requests.keep("tenant", tenants)
        self.tenant_tokens.keep("tenant", tenants)
        self._models &= {model.id for each in watched.registry.all() for model in each.models}
        self.model_requests.keep("model", {OTHER, *self._models})


def _spans(counts: "SpanCounts") -> Metric:
    metric = family_of(catalogue.TRACE_SPANS)
    for outcome, spans in (("exported", counts.exported), ("failed", counts.failed), ("dropped", counts.dropped)):
        metric.add_sample(catalogue.TRACE_SPANS.exposed, {"outcome": outcome}, spans)
    return metric


class _Own(Collector):
    """Registering asks for nothing: ``describe`` is empty."""

    def __init__(self, families: Callable[[], Iterator[Metric]]) -> None:
        self._families = families

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._families()


def _fleet(watched: Watched) -> Iterator[Metric]:
    registry = watched.registry
    everyone = registry.all()
    yield gauge_of(
        catalogue.INSTANCE_STATE,
        (((each.id, state), float(each.state is state)) for each in everyone for state in InstanceState),
    )
    yield gauge_of(catalogue.INSTANCE_DRAINING, (((each.id,), float(each.draining)) for each in everyone))
    yield gauge_of(
        catalogue.INSTANCE_BREAKER,
        (
            ((each.id, setting), float(registry.breakers.state(each.id) is setting))
            for each in everyone
            for setting in BreakerState
        ),
    )
    excused = family_of(catalogue.HEALTH_CHECKS_EXCUSED)
    for cause, checks in registry.checks.excused.items():
        excused.add_sample(catalogue.HEALTH_CHECKS_EXCUSED.exposed, {"cause": cause.value}, checks)
    yield excused
    yield gauge_of(catalogue.IN_FLIGHT, (((each.id,), watched.load.of(each.id).in_flight) for each in everyone))
    yield gauge_of(
        catalogue.INSTANCE_LIMIT, (((each.id,), watched.admission.capacity.limit(each)) for each in everyone)
    )
    yield gauge_of(
        catalogue.RESIDENT_BLOCKS,
        (((each.id, tier), blocks) for each in everyone for tier, blocks in watched.index.blocks_held(each.id).items()),
    )
    yield gauge_of(catalogue.WAITING, iter([((), watched.admission.waiting)]))


def _tenants(accounts: Mapping[TenantId, Tenant]) -> Iterator[Metric]:
    yield gauge_of(
        catalogue.TENANT_INFO, (((name, tenant_of_salt(tenant.salt)), 1) for name, tenant in accounts.items())
    )

    def quotas() -> Iterator[tuple[Labels, float]]:
        for name, tenant in accounts.items():
            limits = tenant.limits
            values = (limits.requests_per_min, limits.tokens_per_min, limits.concurrency, limits.context_tokens)
            for quota, value in zip(_QUOTAS, values, strict=True):
                if value is not None:
                    yield (name, quota), value

    yield gauge_of(catalogue.TENANT_QUOTA, quotas())
