"""Constructs the request path: admission, placement, the pipeline, and the API that clients call."""

import secrets
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import monotonic

from gateway.admission import AdmissionController, ConcurrencyLimiter, QueueRules
from gateway.admission.fair_threads import FairThreads
from gateway.api.openai import OpenAiApi
from gateway.execution.forward import Forwarder
from gateway.execution.handover import leg_runners
from gateway.execution.legs import LegExecutor
from gateway.execution.running_plans import RunningPlans
from gateway.fingerprint import Fingerprinter
from gateway.http.body_memory import BodyMemory
from gateway.http.connection_pool import ConnectionPool
from gateway.limits import SloClass
from gateway.pipeline import Limits, Pipeline
from gateway.placement.planner import Planner
from gateway.placement.separation import Separation
from gateway.requests.reader import Reader, ReadingLimits
from gateway.requests.tokens import TokenApi
from gateway.routing import POLICIES, Calibration, CostModel, LearnedAffinity, RecentRoutes
from gateway.settings.admission import AdmissionSettings
from gateway.settings.routing import RoutingSettings
from gateway.settings.separation import SeparationSettings
from gateway.telemetry import Watched
from gateway.upstream import RetryBudget, UpstreamClient
from gateway.wiring.base import Base
from gateway.wiring.instances import Instances
from gateway.wiring.observation import Observation
from kvcontrol.scheduler_ir import PhaseLimits, ThresholdSeparator

_THREADS = 3
"""For reading and tokenizing long requests, two of which may be very long: they mostly compute without the GIL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What serves requests, as far as other components know it."""

    admission: AdmissionController
    planner: Planner
    fingerprinter: Fingerprinter
    plans: RunningPlans
    api: OpenAiApi


def open_threads(base: Base, observation: Observation) -> AbstractContextManager[FairThreads]:
    """Return the threads that read and tokenize long requests; a tokenizer that isn't thread-safe gets one."""
    several = base.tokenizer is None or base.tokenizer.thread_safe
    queue = base.settings.admission
    return FairThreads(
        _THREADS if several else 1,
        memory=BodyMemory(base.settings.requests.body_memory_bytes, shed=observation.telemetry.shed),
        bound=queue.queue_length,
        ageing_s=queue.queue_ageing_s,
        clock=monotonic,
    )


def cost_model(routing: RoutingSettings) -> CostModel:
    """Return what is assumed of instances until it is measured."""
    return CostModel(
        prefill_tokens_per_s=routing.prefill_tokens_per_s,
        decode_load_s=routing.decode_load_s,
        spread=routing.routing_spread,
    )


def build_serving(
    base: Base, instances: Instances, observation: Observation, threads: FairThreads, pool: ConnectionPool
) -> Serving:
    """Return the request path; its metrics are watched from now on."""
    settings = base.settings
    admission = _admission(settings.admission, settings.separation, base, instances, observation)
    planner = _planner(settings.routing, settings.separation, instances)
    observation.metrics.watch(
        Watched(
            registry=instances.registry,
            load=instances.load,
            index=instances.index,
            admission=admission,
            accounts=lambda: base.authenticator.accounts,
            problems=observation.problems,
            spans=base.traces.counts if base.traces else None,
        )
    )
    fingerprinter = Fingerprinter(base.tokenizer, threads)
    plans = RunningPlans()
    pipeline = Pipeline(
        limits=_limits(base),
        authenticator=base.authenticator,
        reader=_reader(base, instances, threads, fingerprinter, admission),
        admission=admission,
        forwarder=_forwarder(base, instances, observation, pool, admission, planner, plans),
        registry=instances.registry,
        telemetry=observation.telemetry,
        via=base.via,
        shutdown=base.shutdown,
        tokens=None
        if base.tokenizer is None
        else TokenApi(tokenizer=base.tokenizer, threads=threads, registry=instances.registry),
        tracer=base.traces.tracer if base.traces else None,
    )
    api = OpenAiApi(
        pipeline=pipeline,
        authenticator=base.authenticator,
        registry=instances.registry,
        via=base.via,
        send_timeout_s=settings.server.send_timeout_s,
    )
    return Serving(admission=admission, planner=planner, fingerprinter=fingerprinter, plans=plans, api=api)


def _waits_s(queue: AdmissionSettings) -> dict[SloClass, float]:
    return {
        SloClass.INTERACTIVE: queue.queue_interactive_s,
        SloClass.STANDARD: queue.queue_standard_s,
        SloClass.BATCH: queue.queue_batch_s,
    }


def _admission(
    queue: AdmissionSettings, phases: SeparationSettings, base: Base, instances: Instances, observation: Observation
) -> AdmissionController:
    return AdmissionController(
        registry=instances.registry,
        load=instances.load,
        quotas=base.shared.quotas,
        limiter=ConcurrencyLimiter(
            most=queue.max_instance_requests,
            slow_s=queue.slow_first_byte_s,
            clock=monotonic,
            most_decoding=phases.decode_max_requests,
        ),
        rules=QueueRules(bound=queue.queue_length, ageing_s=queue.queue_ageing_s, deadlines_s=_waits_s(queue)),
        meter=observation.telemetry,
        clock=monotonic,
    )


def _planner(routing: RoutingSettings, phases: SeparationSettings, instances: Instances) -> Planner:
    costs = cost_model(routing)
    return Planner(
        policy=POLICIES[routing.routing_policy](costs),
        index=instances.index,
        load=instances.load,
        recent=RecentRoutes(lifetime_s=routing.route_memory_s),
        learned=LearnedAffinity(instances.index, capacity_tokens=routing.learned_capacity_tokens),
        calibration=Calibration(costs),
        clock=monotonic,
        on_contradiction=instances.registry.doubt,
        process=secrets.token_hex(4),
        session_memory_s=routing.session_memory_s,
        separation=Separation(
            ThresholdSeparator(
                min_uncached_tokens=phases.pd_min_uncached_tokens,
                limits=PhaseLimits(requests=phases.prefill_max_requests, tokens=phases.prefill_max_tokens),
                transports=phases.pd_transports,
            )
        ),
        prefilling=instances.registry.available.prefilling,
    )


def _limits(base: Base) -> Limits:
    settings = base.settings
    return Limits(
        request_timeout_s=settings.requests.request_timeout_s,
        waits_s=_waits_s(settings.admission),
        stream_ping_s=settings.upstream.stream_ping_s,
        expected_output_tokens=settings.requests.expected_output_tokens,
    )


def _forwarder(  # noqa: PLR0913, PLR0917 - called once
    base: Base,
    instances: Instances,
    observation: Observation,
    pool: ConnectionPool,
    admission: AdmissionController,
    planner: Planner,
    plans: RunningPlans,
) -> Forwarder:
    upstream = base.settings.upstream
    client = UpstreamClient(pool, instances.timeouts)
    return Forwarder(
        max_attempts=upstream.max_attempts,
        admission=admission,
        planner=planner,
        load=instances.load,
        registry=instances.registry,
        client=client,
        legs=LegExecutor(load=instances.load, runners=leg_runners(client, instances.registry)),
        plans=plans,
        retries=RetryBudget(upstream.retry_budget_ratio),
        telemetry=observation.telemetry,
        via=base.via,
    )


def _reader(
    base: Base,
    instances: Instances,
    threads: FairThreads,
    fingerprinter: Fingerprinter,
    admission: AdmissionController,
) -> Reader:
    requests = base.settings.requests
    return Reader(
        limits=ReadingLimits(
            max_body_bytes=requests.max_body_bytes,
            body_timeout_s=requests.body_timeout_s,
            max_answers=requests.max_answers,
        ),
        memory=threads.memory,
        threads=threads,
        fingerprinter=fingerprinter,
        admission=admission,
        registry=instances.registry,
    )
