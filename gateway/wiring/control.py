"""Constructs the fleet's control: stored documents, policies, KV budgets and pinned prefixes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Final

from gateway.admission import Directory, DirectoryKeeper
from gateway.api.admin import Changes
from gateway.api.admin.auto_swap import AutoSwap
from gateway.fleet import FleetKeeper, InstanceControl, PolicySwap
from gateway.fleet.catalogue import PresetCatalogue
from gateway.fleet.config_sync import ConfigSync
from gateway.fleet.desired_state import desired_state_of
from gateway.fleet.keeper import PolicyChanges
from gateway.fleet.pin_expiry import PinExpiry
from gateway.fleet.pins import PinKeeper
from gateway.fleet.policy_watch import PolicyWatch
from gateway.fleet.rescue import Rescue
from gateway.problems import ProblemKind, Problems
from gateway.registry.membership import Loops
from gateway.state import MalformedStoreError, StoreUnavailableError
from gateway.wiring.base import Base
from gateway.wiring.instances import Instances, Links
from gateway.wiring.observation import Observation
from gateway.wiring.requests import Serving, cost_model
from kvcontrol.presets import Presets

_POLICY_CHANGES: Final = "policy changes of the store"


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """Components that read the store and command the instances."""

    config_sync: ConfigSync
    directory: DirectoryKeeper
    presets: PresetCatalogue
    instance_control: InstanceControl
    swap: PolicySwap
    changes: Changes
    fleet: FleetKeeper
    auto: AutoSwap
    pins: PinKeeper
    rescue: Rescue

    def loops(self, poll_s: float) -> Loops:
        """Return the loops that follow the store, ``poll_s`` apart, and command the instances."""
        return {
            "fleet": self.fleet.run,
            "shadows": self.auto.run,
            "pins": self.pins.run,
            "directory": partial(self.directory.run, poll_s),
            "operations": partial(self.changes.operations.run, self.rescue.round),
        }


def build_config_sync(base: Base, instances: Instances, serving: Serving, observation: Observation) -> ConfigSync:
    """Return what applies the stored instances and routing."""
    return ConfigSync(
        registry=instances.registry,
        planner=serving.planner,
        rules=instances.rules,
        policy=base.settings.routing.routing_policy,
        costs=cost_model(base.settings.routing),
        drain_s=base.settings.fleet.drain_timeout_s,
        problems=observation.problems,
    )


def build_control(
    base: Base, instances: Instances, links: Links, observation: Observation, config_sync: ConfigSync
) -> Control:
    """Return the control plane; its loops don't run yet."""
    store, registry = base.shared.store, instances.registry
    directory = _directory_keeper(base, instances, observation, config_sync)
    presets = PresetCatalogue(Presets.shipped(), lambda: directory.current.workloads, observation.problems)
    control = InstanceControl(links.client, timeout_s=base.settings.fleet.control_timeout_s)
    swap = PolicySwap(control)

    lease_s = base.settings.state.operation_lease_s
    changes = Changes(store, directory.refresh, lease_s=lease_s)
    fleet = FleetKeeper(
        registry=registry,
        control=control,
        swap=swap,
        pending=partial(_pending_changes, directory, changes, observation.problems),
        watch=PolicyWatch(observation.problems),
        problems=observation.problems,
        desired=lambda: desired_state_of(
            directory.current, presets.all(), base.authenticator.configured, observation.problems
        ),
        salt=base.authenticator.salt,
        clock=monotonic,
    )
    pins = PinKeeper(
        registry=registry,
        control=control,
        pins=lambda: directory.current.pins,
        expired=PinExpiry(store, directory.refresh),
        clock=monotonic,
        now=base.clock,
    )
    rescue = Rescue(
        store,
        registry=registry,
        swap=swap,
        pins=pins,
        problems=observation.problems,
        clock=monotonic,
        lease_s=lease_s,
    )
    return Control(
        config_sync=config_sync,
        directory=directory,
        presets=presets,
        instance_control=control,
        swap=swap,
        changes=changes,
        fleet=fleet,
        auto=_auto_swap(base, instances, changes, control, swap),
        pins=pins,
        rescue=rescue,
    )


def _auto_swap(
    base: Base, instances: Instances, changes: Changes, control: InstanceControl, swap: PolicySwap
) -> AutoSwap:
    settings = base.settings.fleet
    return AutoSwap(
        changes=changes,
        registry=instances.registry,
        control=control,
        swap=swap,
        clock=monotonic,
        active=settings.auto_policy,
        period_s=settings.shadow_period_s,
        dwell_s=settings.auto_policy_dwell_s,
    )


def _directory_keeper(
    base: Base, instances: Instances, observation: Observation, config_sync: ConfigSync
) -> DirectoryKeeper:
    authenticator = base.authenticator

    def publish(directory: Directory) -> None:
        authenticator.publish(directory)
        instances.registry.checks.tenants(several=authenticator.several)
        config_sync.apply(directory)

    return DirectoryKeeper(
        base.shared.store,
        publish=publish,
        expire=authenticator.distrust,
        trust_s=base.settings.state.store_trust_s,
        clock=base.clock,
        problems=observation.problems,
    )


async def _pending_changes(
    directory: DirectoryKeeper, changes: Changes, problems: Problems, newest: Mapping[str, int]
) -> PolicyChanges | None:
    """Return the pending changes of policies, and then refresh the directory: it contains the policies of all changes
    that have ended. None where the store can't be read; where only its changes of policies can't be, that is a problem.
    """
    try:
        pending = await changes.operations.policy_changes(newest)
    except MalformedStoreError as error:
        problems.report(
            ProblemKind.STORE,
            _POLICY_CHANGES,
            f"the changes of policies can't be read: {error}; until then instances may run different policies, and "
            "swaps are refused with 503",
        )
        return None
    except StoreUnavailableError:
        return None
    problems.clear(ProblemKind.STORE, _POLICY_CHANGES)
    try:
        await directory.refresh()
    except StoreUnavailableError:
        return None
    return pending
