"""Constructs the routes of operators: /admin/v1, health, metrics and the status page."""

from collections.abc import Sequence

from fastapi import APIRouter

from gateway.api.admin import admin_routers
from gateway.api.admin.explain import explain_router
from gateway.api.admin.instances import InstanceViews, instances_router, leases_router
from gateway.api.admin.own_presets import own_presets_router
from gateway.api.admin.plans import plans_router
from gateway.api.admin.policies import policies_router
from gateway.api.admin.prefix_commands import PrefixCommands
from gateway.api.admin.prefix_names import PrefixNames
from gateway.api.admin.prefixes import prefixes_router
from gateway.api.admin.presets import presets_router
from gateway.api.admin.routing import routing_router
from gateway.api.admin.shadow import shadow_router
from gateway.api.admin.status import StatusBoard, status_router
from gateway.api.dashboard import dashboard_router
from gateway.api.described import docs_router
from gateway.api.ops import ops_router
from gateway.dashboard import FleetBoard
from gateway.registry import Membership
from gateway.registry.leases import Leases
from gateway.wiring.base import Base
from gateway.wiring.control import Control
from gateway.wiring.instances import Instances
from gateway.wiring.observation import Observation
from gateway.wiring.requests import Serving


def operator_routers(  # noqa: PLR0913, PLR0917 - called once
    base: Base,
    instances: Instances,
    serving: Serving,
    control: Control,
    observation: Observation,
    membership: Membership,
    leases: Leases,
) -> Sequence[APIRouter]:
    """Return all routers of operators."""
    board = FleetBoard(
        registry=instances.registry,
        load=instances.load,
        index=instances.index,
        planner=serving.planner,
        telemetry=observation.telemetry,
    )
    views = InstanceViews(
        registry=instances.registry,
        membership=membership,
        load=instances.load,
        planner=serving.planner,
        leases=leases,
        rules=instances.rules,
        own=(base.settings.server.host, base.settings.server.port),
    )
    return (
        ops_router(
            registry=instances.registry,
            metrics=observation.metrics,
            problems=observation.problems,
            access=base.operators,
            confirmed=lambda: base.authenticator.confirmed,
            shutdown=base.shutdown,
            siblings=base.siblings,
        ),
        docs_router(),
        dashboard_router(base.assets, board, base.operators),
        *admin_routers(
            changes=control.changes,
            authenticator=base.authenticator,
            meter=base.shared.quotas,
            clock=base.clock,
            more=(
                leases_router(views),
                instances_router(control.changes, views),
                status_router(_status_board(base, serving, observation, board, views)),
                *_placement_routers(base, instances, serving, control),
                *_fleet_routers(base, instances, serving, control),
            ),
        ),
    )


def _placement_routers(base: Base, instances: Instances, serving: Serving, control: Control) -> Sequence[APIRouter]:
    return (
        routing_router(control.changes, control.config_sync),
        plans_router(control.changes, serving.plans),
        explain_router(
            registry=instances.registry,
            planner=serving.planner,
            fingerprinter=serving.fingerprinter,
            authenticator=base.authenticator,
            expected_output_tokens=base.settings.requests.expected_output_tokens,
        ),
    )


def _fleet_routers(base: Base, instances: Instances, serving: Serving, control: Control) -> Sequence[APIRouter]:
    registry, changes = instances.registry, control.changes
    names = PrefixNames(
        registry=registry,
        index=instances.index,
        planner=serving.planner,
        fingerprinter=serving.fingerprinter,
        authenticator=base.authenticator,
    )
    return (
        shadow_router(registry=registry, control=control.instance_control, auto=control.auto),
        policies_router(
            changes, registry=registry, control=control.instance_control, swap=control.swap, keeper=control.fleet
        ),
        prefixes_router(
            changes,
            names=names,
            commands=PrefixCommands(names=names, registry=registry, keeper=control.pins, now=base.clock),
        ),
        presets_router(changes, presets=control.presets, registry=registry, swap=control.swap),
        own_presets_router(changes, presets=control.presets),
    )


def _status_board(
    base: Base, serving: Serving, observation: Observation, board: FleetBoard, views: InstanceViews
) -> StatusBoard:
    return StatusBoard(
        fleet=board,
        views=views,
        admission=serving.admission,
        authenticator=base.authenticator,
        meter=base.shared.quotas,
        telemetry=observation.telemetry,
        siblings=base.siblings,
        problems=observation.problems,
    )
