"""Constructs the registry of instances, load, residency index, health checks, events and discovery."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic
from urllib.parse import urlsplit

import httpx2
import zmq.asyncio

from gateway.registry import BreakerRules, HealthLoop, InstanceSpec, Isolation, LoadTracker, Membership, Registry
from gateway.registry.addresses import AddressRules
from gateway.registry.checks import CheckRules
from gateway.registry.discovery import DiscoveryLoop, chosen_watchers
from gateway.registry.lease_board import LeaseBoard
from gateway.registry.leases import Leases
from gateway.registry.membership import Loops, Witness
from gateway.registry.panic import PanicRules
from gateway.settings import Settings
from gateway.upstream import EventFeed, SlicedWork, Timeouts
from gateway.upstream.resolver import GuardedResolver
from gateway.wiring.observation import Observation
from kvcontrol.core.ids import InstanceId
from kvcontrol.prefix_reuse import FleetIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class Instances:
    """What the gateway knows about its instances, and how it reaches them."""

    registry: Registry
    load: LoadTracker
    index: FleetIndex
    rules: AddressRules
    resolver: GuardedResolver
    timeouts: Timeouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Connections of this process to instances beside those of requests."""

    client: httpx2.AsyncClient
    context: zmq.asyncio.Context


def build_instances(settings: Settings) -> Instances:
    """Return the state of the instances that the settings name; nothing is asked of them yet."""
    health, fleet, upstream = settings.health, settings.fleet, settings.upstream
    registry = Registry(
        (InstanceSpec(id=InstanceId(each.id), url=each.url, role=each.role) for each in fleet.instances),
        rules=CheckRules(
            unhealthy_after=health.unhealthy_after,
            isolation=Isolation(health.isolation),
            panic=PanicRules(share=health.panic_threshold),
            first_check_s=health.health_timeout_s,
        ),
        breaker=BreakerRules(failures=health.breaker_failures, pause_s=health.breaker_pause_s),
        model_memory_s=health.model_memory_s,
    )
    rules = AddressRules.of(fleet.instance_schemes, fleet.instance_networks)
    own_hosts = {urlsplit(each.url).hostname for each in fleet.instances}
    return Instances(
        registry=registry,
        load=LoadTracker(),
        index=FleetIndex(),
        rules=rules,
        resolver=GuardedResolver(rules, trusted=own_hosts.__contains__),
        timeouts=Timeouts(
            connect_s=upstream.connect_timeout_s,
            first_byte_s=upstream.first_byte_timeout_s,
            idle_s=upstream.idle_timeout_s,
            hung_s=min(upstream.idle_timeout_s, health.health_timeout_s),
        ),
    )


def build_membership(
    settings: Settings,
    instances: Instances,
    links: Links,
    observation: Observation,
    witnesses: Iterable[Witness],
) -> Membership:
    """Return what gives each instance its loops: health checks and the event feed."""
    telemetry = observation.telemetry
    return Membership(
        registry=instances.registry,
        load=instances.load,
        loops_of=_loops_of(settings, instances, links, observation),
        on_failure=telemetry.loop_failed,
        witnesses=(telemetry, *witnesses),
    )


def _loops_of(
    settings: Settings, instances: Instances, links: Links, observation: Observation
) -> Callable[[InstanceId], Loops]:
    sliced = SlicedWork()

    def loops_of(instance: InstanceId) -> Loops:
        health = HealthLoop(
            instance,
            registry=instances.registry,
            load=instances.load,
            client=links.client,
            interval_s=settings.health.health_interval_s,
            timeout_s=settings.health.health_timeout_s,
            rules=instances.rules,
            lag_s=lambda: observation.lag.total_s,
        )
        feed = EventFeed(
            instance,
            registry=instances.registry,
            index=instances.index,
            client=links.client,
            context=links.context,
            sliced=sliced,
            meter=observation.telemetry,
        )
        return {f"health:{instance}": health.run, f"events:{instance}": feed.run}

    return loops_of


def build_leases(settings: Settings, instances: Instances, membership: Membership, board: LeaseBoard) -> Leases:
    """Return the leases of instances that register themselves."""
    return Leases(
        membership=membership,
        registry=instances.registry,
        board=board,
        rules=instances.rules,
        drain_s=settings.fleet.drain_timeout_s,
        clock=monotonic,
    )


def discovery_loops(
    settings: Settings, instances: Instances, membership: Membership, observation: Observation
) -> Loops:
    """Return a loop for each way of discovery that is set up."""
    return {
        f"discovery:{each.source}": DiscoveryLoop(
            each,
            membership=membership,
            rules=instances.rules,
            drain_s=settings.fleet.drain_timeout_s,
            loss_s=settings.fleet.discovery_loss_s,
            problems=observation.problems,
        ).run
        for each in chosen_watchers(settings.fleet)
    }
