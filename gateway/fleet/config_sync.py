"""Applies operators' changes of instances and routing in this process, also after a restart.

Their changes are in the store; ``apply`` runs after each read of the store. So all gateways of a store reach the same
state, also one that was down during the change.
"""

import logging
from collections.abc import Mapping
from typing import Final

from gateway.admission import Directory
from gateway.placement.planner import Planner
from gateway.problems import ProblemKind, Problems
from gateway.registry import InstanceSpec, Membership, Registry, Source
from gateway.registry.addresses import AddressError, AddressRules
from gateway.routing import POLICIES, CostModel
from gateway.state.fleet_bodies import PolicyName, RoutingBody
from kvcontrol.core.ids import InstanceId
from kvcontrol.core.roles import EngineRole

_URL: Final = "url of instance "
"""Begins the subjects of problems with the URLs of stored instances."""

_log = logging.getLogger(__name__)


class ConfigSync:
    """Observes the membership: an instance with a stored drain or role joins with it."""

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        *,
        registry: Registry,
        planner: Planner,
        rules: AddressRules,
        policy: PolicyName,
        costs: CostModel,
        drain_s: float,
        problems: Problems,
    ) -> None:
        """``policy`` and ``costs`` apply where the store has no document."""
        self._registry = registry
        self._planner = planner
        self._rules = rules
        self._policy = policy
        self._costs = costs
        self._drain_s = drain_s
        self._problems = problems
        self._drained: frozenset[InstanceId] = frozenset()
        self._roles: Mapping[InstanceId, EngineRole] = {}
        self._routing: RoutingBody | None = None
        self._membership: Membership | None = None

    def joined(self, instance: InstanceId) -> None:
        """Apply the stored drain and role of an instance that joins."""
        if instance in self._drained:
            self._registry.drain(instance)
        if instance in self._roles:
            self._registry.assign(instance, self._roles[instance])

    def left(self, instance: InstanceId) -> None:
        """Nothing of it is kept here."""

    def routing(self) -> tuple[PolicyName, CostModel]:
        """Return the present policy and cost model."""
        return self.routing_of(self._routing)

    def routing_of(self, desired: RoutingBody | None) -> tuple[PolicyName, CostModel]:
        """Return the routing of a document, with the settings for missing fields."""
        if desired is None:
            return self._policy, self._costs
        base = self._costs
        return desired.policy, CostModel(
            prefill_tokens_per_s=desired.prefill_tokens_per_s or base.prefill_tokens_per_s,
            decode_load_s=base.decode_load_s if desired.decode_load_s is None else desired.decode_load_s,
            spread=base.spread if desired.spread is None else desired.spread,
        )

    def follow(self, membership: Membership, directory: Directory) -> None:
        """Apply the stored documents to these members from now on."""
        self._membership = membership
        self.apply(directory)

    def apply(self, directory: Directory) -> None:
        """Apply the stored members, drains, roles and routing policy."""
        if self._membership is None:
            return
        bodies = {InstanceId(name): body for name, body in directory.instances.items()}
        self._take_routing(directory.routing)
        self._drained = frozenset(name for name, body in bodies.items() if body.draining)
        self._roles = {name: body.role for name, body in bodies.items() if body.role is not None}
        specs, unusable = [], {}
        for name, body in bodies.items():
            if body.url is None:
                continue
            try:
                specs.append(InstanceSpec(id=name, url=self._rules.origin(body.url), source=Source.ADMIN))
            except AddressError as error:  # other settings allowed it when it was written
                unusable[_URL + name] = f"the stored instance {name} is not a member: {error}; PUT or DELETE it"
        self._problems.replace(ProblemKind.DOCUMENT, _URL, unusable)
        self._membership.reconcile(Source.ADMIN, specs, drain_s=self._drain_s)
        for each in self._registry.all():
            if self._membership.leaving(each.id):
                continue
            if each.draining is not (each.id in self._drained):
                self._registry.drain(each.id, draining=not each.draining)
            if each.assigned_role is not self._roles.get(each.id):
                self._registry.assign(each.id, self._roles.get(each.id))

    def _take_routing(self, desired: RoutingBody | None) -> None:
        if desired == self._routing:
            return
        self._routing = desired
        policy, costs = self.routing()
        self._planner.swap(POLICIES[policy](costs))
        _log.info("routing policy is %s now", policy)
