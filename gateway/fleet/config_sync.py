"""Applies operators' changes of instances and routing in this process, also after a restart.

What they said lies in the store; this reads it whenever the store has changed, here or in another gateway, and brings
members, drains and the routing policy to it. So each of several gateways comes to the same, and a change that was made
while one was away is there when it is back.
"""

import asyncio
import logging
from collections.abc import Mapping
from functools import partial

from gateway.placement.planner import Planner
from gateway.problems import Problems
from gateway.registry import InstanceSpec, Membership, Registry, Source
from gateway.registry.addresses import AddressError, AddressRules
from gateway.routing import POLICIES, CostModel
from gateway.state import Kind, Store
from gateway.state.documents import Revision
from gateway.state.fleet_bodies import ROUTING_NAME, InstanceBody, PolicyName, RoutingBody
from gateway.state.stored import DocumentReader, UnreadableDocumentError, read, read_in_part
from kvcontrol.core.ids import InstanceId
from kvcontrol.core.roles import EngineRole

_log = logging.getLogger(__name__)


class ConfigSync:
    """``refresh`` applies what the store says now. A witness of the membership: who is drained, or was given a role,
    joins so.
    """

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        store: Store,
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
        self._store = store
        self._registry = registry
        self._planner = planner
        self._rules = rules
        self._policy = policy
        self._costs = costs
        self._drain_s = drain_s
        self._reader = DocumentReader(problems)
        self._revision: Revision | None = None
        self._drained: frozenset[InstanceId] = frozenset()
        self._roles: Mapping[InstanceId, EngineRole] = {}
        self._routing: RoutingBody | None = None
        self._membership: Membership | None = None

    def joined(self, instance: InstanceId) -> None:
        """An instance that was drained before it came, or given a role, is so from the start."""
        if instance in self._drained:
            self._registry.drain(instance)
        if instance in self._roles:
            self._registry.assign(instance, self._roles[instance])

    def left(self, instance: InstanceId) -> None:
        """Nothing of it is kept here."""

    def routing(self) -> tuple[PolicyName, CostModel]:
        """Return the policy and the assumptions that hold now."""
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

    async def follow(self, membership: Membership) -> None:
        """Apply the store's documents to these members from now on; raises ``StoreUnavailableError``."""
        self._membership = membership
        await self.refresh()

    async def refresh(self) -> None:
        """Apply what the store says if it has changed; raises ``StoreUnavailableError``, and all stays as it was. What
        an unreadable document, or an unreadable field of an instance's, said before goes on to hold.
        """
        if self._membership is None:
            return
        if await self._store.revision() == self._revision:
            return
        stored = await self._store.snapshot([Kind.INSTANCE, Kind.ROUTING])
        routing = stored.documents[Kind.ROUTING]
        desired = self._reader.read(
            Kind.INSTANCE, stored.documents[Kind.INSTANCE], partial(read, InstanceBody), otherwise=_in_part
        )
        bodies = {InstanceId(name): body for name, body in desired.items()}
        self._take_routing(self._reader.read(Kind.ROUTING, routing, partial(read, RoutingBody)).get(ROUTING_NAME))
        self._drained = frozenset(name for name, body in bodies.items() if body.draining)
        self._roles = {name: body.role for name, body in bodies.items() if body.role is not None}
        specs = []
        for name, body in bodies.items():
            if body.url is None:
                continue
            try:
                specs.append(InstanceSpec(id=name, url=self._rules.origin(body.url), source=Source.ADMIN))
            except AddressError as error:  # allowed when it was written, by other settings than these
                _log.warning("instance %s of the store is not added: %s", name, error)
        self._membership.reconcile(Source.ADMIN, specs, drain_s=self._drain_s)
        for each in self._registry.all():
            if self._membership.leaving(each.id):
                continue
            if each.draining is not (each.id in self._drained):
                self._registry.drain(each.id, draining=not each.draining)
            if each.assigned_role is not self._roles.get(each.id):
                self._registry.assign(each.id, self._roles.get(each.id))
        self._revision = stored.revision

    async def run(self, interval_s: float) -> None:
        """Look again and again, for ever; raises ``StoreUnavailableError``, which ends one round of it."""
        while True:
            await asyncio.sleep(interval_s)
            await self.refresh()

    def _take_routing(self, desired: RoutingBody | None) -> None:
        if desired == self._routing:
            return
        self._routing = desired
        policy, costs = self.routing()
        self._planner.swap(POLICIES[policy](costs))
        _log.info("routing policy is %s now", policy)


def _in_part(error: UnreadableDocumentError, before: InstanceBody | None) -> InstanceBody | None:
    return read_in_part(InstanceBody, error, before, instead={"draining": True})
