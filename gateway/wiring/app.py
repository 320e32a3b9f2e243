"""The only place that constructs and wires components."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from time import monotonic
from urllib.parse import urlsplit

import zmq.asyncio
from fastapi import FastAPI

from gateway.admission import (
    AdmissionController,
    Authenticator,
    ConcurrencyLimiter,
    Directory,
    DirectoryKeeper,
    QueueRules,
)
from gateway.admission.fair_threads import FairThreads
from gateway.api.admin import AdminAccess, Changes, add_failure_handlers, admin_router
from gateway.api.admin.explain import explain_router
from gateway.api.admin.instances import Roster, instances_router, leases_router
from gateway.api.admin.own_presets import own_presets_router
from gateway.api.admin.plans import plans_router
from gateway.api.admin.policies import policies_router
from gateway.api.admin.prefix_desk import PrefixDesk
from gateway.api.admin.prefix_names import PrefixNames
from gateway.api.admin.prefixes import prefixes_router
from gateway.api.admin.presets import presets_router
from gateway.api.admin.routing import routing_router
from gateway.api.admin.shadow import shadow_router
from gateway.api.admin.status import StatusBoard, status_router
from gateway.api.asgi import Gateway
from gateway.api.browsers import Browsers, Hosts, hosts_of
from gateway.api.dashboard import dashboard_router
from gateway.api.failures import add_last_handlers
from gateway.api.openai import OpenAiApi
from gateway.api.operators import OperatorAccess
from gateway.api.ops import ops_router
from gateway.dashboard import Assets, FleetBoard
from gateway.execution.handover import leg_runners
from gateway.execution.legs import Walker
from gateway.execution.running_plans import RunningPlans
from gateway.fingerprint import Fingerprinter, load_tokenizer
from gateway.fleet import FleetKeeper, InstanceControl, PolicySwap
from gateway.fleet.catalogue import PresetCatalogue
from gateway.fleet.config_sync import RosterKeeper
from gateway.fleet.pin_expiry import PinExpiry
from gateway.fleet.pins import PinKeeper
from gateway.fleet.rescue import Rescue
from gateway.fleet.wishes import wishes_of
from gateway.http.body_memory import BodyMemory
from gateway.http.shutdown import Shutdown
from gateway.http.via import Via
from gateway.limits import SloClass
from gateway.pipeline import Limits, Pipeline
from gateway.placement.planner import Planner
from gateway.placement.separation import Separation
from gateway.problems import Problems
from gateway.registry import BreakerRules, HealthLoop, InstanceSpec, Isolation, LoadTracker, Membership, Registry
from gateway.registry.addresses import AddressRules
from gateway.registry.discovery import DiscoveryLoop, chosen_watchers
from gateway.registry.leases import Leases
from gateway.registry.membership import Loops
from gateway.registry.panic import PanicRules
from gateway.requests.reader import Reader, ReadingLimits
from gateway.requests.tokens import TokenApi
from gateway.routing import POLICIES, Calibration, CostModel, LearnedAffinity, RecentRoutes
from gateway.settings import Settings
from gateway.state import StoreUnavailableError, load_admin_key, load_salt_secret
from gateway.state.shared_clock import SharedClock
from gateway.supervisor import running
from gateway.telemetry import LoopLag, Metrics, Telemetry, Watched, open_traces
from gateway.telemetry.resources import Resources
from gateway.telemetry.siblings import Siblings
from gateway.upstream import ConnectionPool, EventFeed, RetryBudget, Timeouts, Turns, UpstreamClient
from gateway.upstream.resolver import GuardedResolver
from gateway.upstream.session import make_session
from gateway.wiring.shared import open_shared
from kvcontrol.core.ids import InstanceId
from kvcontrol.prefix_reuse import FleetIndex
from kvcontrol.presets import Presets
from kvcontrol.scheduler_ir import PhaseLimits, ThresholdSeparator

_log = logging.getLogger(__name__)
_THREADS = 3
"""For reading and tokenizing long requests, two of which may be very long: they mostly compute without the GIL."""


def build_app(settings: Settings, siblings: Siblings | None = None) -> Gateway:  # noqa: PLR0915 - it wires everything, in one place
    """Return the gateway for these settings; its loops run while its lifespan does.

    Reads the tokenizer and the salt secret, which takes seconds; raises ``StartupError`` when one can't be had.
    """
    secret = settings.access.salt_secret
    salt_secret = secret.get_secret_value().encode() if secret else load_salt_secret(settings.state.state_dir)
    tokenizer = (
        None
        if settings.requests.tokenizer is None
        else load_tokenizer(settings.requests.tokenizer, settings.requests.tokenizer_memory_bytes)
    )
    admin_key = (
        settings.access.admin_key.get_secret_value()
        if settings.access.admin_key
        else load_admin_key(settings.state.state_dir)
    )
    shared_clock = SharedClock()
    authenticator = Authenticator(
        settings.access.api_keys,
        salt_secret=salt_secret,
        require_keys=settings.access.require_keys,
        admin_key=admin_key,
        clock=shared_clock,
    )
    hosts = Hosts([settings.server.host, *hosts_of(settings.access.cors_origins)])
    metrics_key = [settings.access.metrics_key.get_secret_value()] if settings.access.metrics_key else []
    operators = OperatorAccess([] if settings.operators_open else [admin_key, *metrics_key], hosts=hosts)
    shared = open_shared(settings)
    assets = Assets()
    shutdown = Shutdown()
    traces = open_traces(settings.telemetry.otlp_endpoint)
    via = Via(secrets.token_hex(4) if siblings is None else siblings.name)
    store, quotas = shared.store, shared.quotas

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:  # noqa: PLR0915 - likewise
        registry = Registry(
            (InstanceSpec(id=InstanceId(each.id), url=each.url, role=each.role) for each in settings.fleet.instances),
            unhealthy_after=settings.health.unhealthy_after,
            first_check_s=settings.health.health_timeout_s,
            breaker=BreakerRules(failures=settings.health.breaker_failures, pause_s=settings.health.breaker_pause_s),
            isolation=Isolation(settings.health.isolation),
            panic=PanicRules(share=settings.health.panic_threshold),
            model_memory_s=settings.health.model_memory_s,
        )
        rules = AddressRules.of(settings.fleet.instance_schemes, settings.fleet.instance_networks)
        own_hosts = {urlsplit(each.url).hostname for each in settings.fleet.instances}
        resolver = GuardedResolver(rules, trusted=own_hosts.__contains__)
        load = LoadTracker()
        index = FleetIndex()
        metrics = Metrics()
        problems = Problems()
        telemetry = Telemetry(metrics)
        lag = LoopLag(telemetry.lagged)
        waits_s = {
            SloClass.INTERACTIVE: settings.admission.queue_interactive_s,
            SloClass.STANDARD: settings.admission.queue_standard_s,
            SloClass.BATCH: settings.admission.queue_batch_s,
        }
        admission = AdmissionController(
            registry=registry,
            load=load,
            quotas=quotas,
            limiter=ConcurrencyLimiter(
                most=settings.admission.max_instance_requests,
                slow_s=settings.admission.slow_first_byte_s,
                clock=monotonic,
                most_decoding=settings.separation.decode_max_requests,
            ),
            rules=QueueRules(
                bound=settings.admission.queue_length,
                ageing_s=settings.admission.queue_ageing_s,
                deadlines_s=waits_s,
            ),
            meter=telemetry,
            clock=monotonic,
        )
        metrics.watch(
            Watched(
                registry=registry,
                load=load,
                index=index,
                admission=admission,
                accounts=lambda: authenticator.accounts,
                problems=problems,
                spans=traces.counts if traces else None,
            )
        )
        timeouts = Timeouts(
            connect_s=settings.upstream.connect_timeout_s,
            first_byte_s=settings.upstream.first_byte_timeout_s,
            idle_s=settings.upstream.idle_timeout_s,
            hung_s=min(settings.upstream.idle_timeout_s, settings.health.health_timeout_s),
        )
        costs = CostModel(
            prefill_tokens_per_s=settings.routing.prefill_tokens_per_s,
            decode_load_s=settings.routing.decode_load_s,
            spread=settings.routing.routing_spread,
        )
        planner = Planner(
            policy=POLICIES[settings.routing.routing_policy](costs),
            index=index,
            load=load,
            recent=RecentRoutes(lifetime_s=settings.routing.route_memory_s),
            learned=LearnedAffinity(index, capacity_tokens=settings.routing.learned_capacity_tokens),
            calibration=Calibration(costs),
            clock=monotonic,
            on_contradiction=registry.doubt,
            process=secrets.token_hex(4),
            session_memory_s=settings.routing.session_memory_s,
            separation=Separation(
                ThresholdSeparator(
                    min_uncached_tokens=settings.separation.pd_min_uncached_tokens,
                    limits=PhaseLimits(
                        requests=settings.separation.prefill_max_requests,
                        tokens=settings.separation.prefill_max_tokens,
                    ),
                    transports=settings.separation.pd_transports,
                )
            ),
            prefilling=registry.prefilling,
        )
        roster_keeper = RosterKeeper(
            store,
            registry=registry,
            planner=planner,
            rules=rules,
            policy=settings.routing.routing_policy,
            costs=costs,
            drain_s=settings.fleet.drain_timeout_s,
            problems=problems,
        )
        with (
            FairThreads(
                _THREADS if tokenizer is None or tokenizer.thread_safe else 1,
                bound=settings.admission.queue_length,
                ageing_s=settings.admission.queue_ageing_s,
                clock=monotonic,
            ) as threads,
            zmq.asyncio.Context() as context,
            closing(ConnectionPool(resolver)) as pool,
        ):
            async with make_session(timeouts, resolver, headers=via.text()) as session:
                fingerprinter = Fingerprinter(tokenizer, threads)
                plans = RunningPlans()
                pipeline = Pipeline(
                    limits=Limits(
                        request_timeout_s=settings.requests.request_timeout_s,
                        waits_s=waits_s,
                        max_attempts=settings.upstream.max_attempts,
                        stream_ping_s=settings.upstream.stream_ping_s,
                        expected_output_tokens=settings.requests.expected_output_tokens,
                    ),
                    authenticator=authenticator,
                    reader=Reader(
                        limits=ReadingLimits(
                            max_body_bytes=settings.requests.max_body_bytes,
                            body_timeout_s=settings.requests.body_timeout_s,
                            max_answers=settings.requests.max_answers,
                        ),
                        memory=BodyMemory(settings.requests.body_memory_bytes, shed=telemetry.shed),
                        threads=threads,
                        fingerprinter=fingerprinter,
                        admission=admission,
                        registry=registry,
                    ),
                    admission=admission,
                    planner=planner,
                    load=load,
                    registry=registry,
                    client=UpstreamClient(pool, timeouts),
                    walker=Walker(load=load, runners=leg_runners(UpstreamClient(pool, timeouts), registry)),
                    plans=plans,
                    retries=RetryBudget(settings.upstream.retry_budget_ratio),
                    telemetry=telemetry,
                    via=via,
                    shutdown=shutdown,
                    tokens=None
                    if tokenizer is None
                    else TokenApi(tokenizer=tokenizer, threads=threads, registry=registry),
                    tracer=traces.tracer if traces else None,
                )
                app.include_router(
                    ops_router(
                        registry=registry,
                        metrics=metrics,
                        problems=problems,
                        access=operators,
                        confirmed=lambda: authenticator.confirmed,
                        shutdown=shutdown,
                        siblings=siblings,
                    )
                )
                board = FleetBoard(registry=registry, load=load, index=index, planner=planner, telemetry=telemetry)
                app.include_router(dashboard_router(assets, board, operators))
                app.inference = OpenAiApi(
                    pipeline=pipeline,
                    authenticator=authenticator,
                    registry=registry,
                    via=via,
                    send_timeout_s=settings.server.send_timeout_s,
                )
                turns = Turns()

                def loops_of(instance: InstanceId) -> Loops:
                    health = HealthLoop(
                        instance,
                        registry=registry,
                        load=load,
                        session=session,
                        interval_s=settings.health.health_interval_s,
                        timeout_s=settings.health.health_timeout_s,
                        rules=rules,
                        lag_s=lambda: lag.total_s,
                    )
                    feed = EventFeed(
                        instance,
                        registry=registry,
                        index=index,
                        session=session,
                        context=context,
                        turns=turns,
                        meter=telemetry,
                    )
                    return {f"health:{instance}": health.run, f"events:{instance}": feed.run}

                membership = Membership(
                    registry=registry,
                    load=load,
                    loops_of=loops_of,
                    on_failure=telemetry.loop_failed,
                    witnesses=(telemetry, planner, roster_keeper),
                )
                leases = Leases(
                    membership=membership,
                    registry=registry,
                    board=shared.board,
                    rules=rules,
                    drain_s=settings.fleet.drain_timeout_s,
                    clock=monotonic,
                )
                discovery: Loops = {
                    f"discovery:{each.source}": DiscoveryLoop(
                        each,
                        membership=membership,
                        rules=rules,
                        drain_s=settings.fleet.drain_timeout_s,
                        loss_s=settings.fleet.discovery_loss_s,
                        problems=problems,
                    ).run
                    for each in chosen_watchers(settings.fleet)
                }

                def publish(directory: Directory) -> None:
                    authenticator.publish(directory)
                    registry.tenants(several=authenticator.several)

                keeper = DirectoryKeeper(
                    store,
                    publish=publish,
                    expire=authenticator.distrust,
                    trust_s=settings.state.store_trust_s,
                    clock=shared_clock,
                    problems=problems,
                )
                presets = PresetCatalogue(Presets.shipped(), lambda: keeper.current.workloads)
                control = InstanceControl(session, timeout_s=settings.fleet.control_timeout_s)
                swap = PolicySwap(control)

                async def refresh() -> None:
                    await keeper.refresh()
                    await roster_keeper.refresh()

                changes = app.state.admin_changes = Changes(store, refresh)

                async def settled() -> bool:
                    try:
                        await keeper.refresh()
                        return not await changes.acts.policies_change()
                    except StoreUnavailableError:
                        return False

                fleet = FleetKeeper(
                    registry=registry,
                    control=control,
                    swap=swap,
                    settled=settled,
                    wishes=lambda: wishes_of(keeper.current, presets.all(), authenticator.configured),
                    salt=authenticator.salt,
                    clock=monotonic,
                )

                names = PrefixNames(
                    registry=registry,
                    index=index,
                    planner=planner,
                    fingerprinter=fingerprinter,
                    authenticator=authenticator,
                )
                pins = PinKeeper(
                    registry=registry,
                    control=control,
                    pins=lambda: keeper.current.pins,
                    expired=PinExpiry(store, refresh),
                    clock=monotonic,
                    now=shared_clock,
                )
                rescue = Rescue(store, registry=registry, swap=swap, pins=pins, problems=problems, clock=monotonic)
                roster = Roster(
                    registry=registry,
                    membership=membership,
                    load=load,
                    planner=planner,
                    leases=leases,
                    rules=rules,
                    own=(settings.server.host, settings.server.port),
                )
                app.include_router(
                    admin_router(
                        changes=changes,
                        authenticator=authenticator,
                        meter=quotas,
                        clock=shared_clock,
                        more=(
                            leases_router(roster),
                            instances_router(changes, roster),
                            routing_router(changes, roster_keeper),
                            plans_router(changes, plans),
                            explain_router(
                                registry=registry,
                                planner=planner,
                                fingerprinter=fingerprinter,
                                authenticator=authenticator,
                                expected_output_tokens=settings.requests.expected_output_tokens,
                            ),
                            status_router(
                                StatusBoard(
                                    fleet=board,
                                    roster=roster,
                                    admission=admission,
                                    authenticator=authenticator,
                                    meter=quotas,
                                    telemetry=telemetry,
                                    siblings=siblings,
                                    problems=problems,
                                )
                            ),
                            shadow_router(registry=registry, control=control),
                            policies_router(changes, registry=registry, control=control, swap=swap, keeper=fleet),
                            prefixes_router(
                                changes,
                                names=names,
                                desk=PrefixDesk(names=names, registry=registry, keeper=pins, now=shared_clock),
                            ),
                            presets_router(changes, presets=presets, registry=registry, swap=swap),
                            own_presets_router(changes, presets=presets),
                        ),
                    )
                )
                loops: Loops = {
                    "admission": admission.run,
                    "quotas": quotas.run,
                    "fleet": fleet.run,
                    "pins": pins.run,
                    "directory": partial(keeper.run, settings.state.store_poll_s),
                    "roster": partial(roster_keeper.run, settings.state.store_poll_s),
                    "leases": leases.run,
                    "acts": partial(changes.acts.run, rescue.round),
                    "lag": lag.run,
                    "resources": Resources(
                        problems, folder=None if settings.state.store_url is not None else settings.state.state_dir
                    ).run,
                    "traffic": partial(telemetry.traffic.run, lambda: load.total, lambda: admission.waiting),
                }
                try:
                    registry.tenants(several=authenticator.several)
                    await keeper.look()
                    _say_mode(settings, authenticator)
                    async with membership:
                        await roster_keeper.follow(membership)
                        async with running({**loops, **discovery}, on_failure=telemetry.loop_failed):
                            yield
                finally:
                    await shared.close()
                    if traces is not None:
                        await asyncio.to_thread(traces.close)

    app = Gateway(shutdown, title="kvgate", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.browsers = Browsers(settings.access.cors_origins, hosts=hosts, keyless=lambda: authenticator.open)
    add_failure_handlers(app)
    add_last_handlers(app)
    app.state.admin_access = AdminAccess(admin_key)
    app.state.registration_access = (
        AdminAccess(settings.access.registration_key.get_secret_value()) if settings.access.registration_key else None
    )
    return app


def _say_mode(settings: Settings, authenticator: Authenticator) -> None:
    if authenticator.open:
        _log.warning("there are no API keys yet: any API key is accepted, and each is a tenant of its own")
    if settings.requests.tokenizer is None:
        _log.warning(
            "no tokenizer is configured: texts are routed by load or by where their like went, not by announced blocks"
        )
    _log.info("%d instances, routing policy %s", len(settings.fleet.instances), settings.routing.routing_policy)


__all__ = ["build_app"]
