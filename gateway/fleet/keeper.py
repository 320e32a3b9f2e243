"""Keeps instances at the state in the store: tenants' KV budgets and the fleet's policies.

An engine forgets both when it restarts, and one may join at any time, so this is a loop, not an event: once a second it
looks at what each usable instance was told in its present life (its epoch), and tells the difference. At first, and
then every few seconds, each is asked what it does run: somebody else may have told it something, and be gone. A budget
that the store doesn't have is taken back. What an instance refuses is shown and tried again after a minute, or when it
is asked for something else. One that does not answer at all is left in peace for a while: whoever waits for it keeps a
change of policies from its turn.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gateway.fleet.budgets import (
    LOWER_TIERS,
    BudgetKey,
    Budgets,
    ask_budgets,
    budget_of,
    quota_of,
    send_budget,
    share_of,
)
from gateway.fleet.control import InstanceControl, InstanceControlError
from gateway.fleet.policies import Policy, PolicySwap, SwapBusyError
from gateway.fleet.policy_watch import PolicyWatch
from gateway.limits import KvBudget, TenantLimits
from gateway.registry import Instance, Registry
from gateway.types import TenantId
from kvcontrol.core.ids import Epoch, InstanceId
from kvcontrol.core.tenant import tenant_of_salt
from kvcontrol.core.tier_control import QUOTAS_PATH, QuotaBody
from kvcontrol.presets import QuotaPart

_INTERVAL_S: Final = 1.0
_AGAIN_AFTER_S: Final = 60.0
_LOOK_EVERY_S: Final = 5.0
_SEEN: Final = 2
"""An instance that owes a policy has to be seen so often to run it: what it was told before may come late."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredState:
    """What the store says that instances should do. ``shares`` of a preset hold for ``tenants`` without KV budgets.
    ``whole`` is whether all of it could be read: only then an instance that keeps more keeps too much.
    """

    limits: Mapping[TenantId, TenantLimits]
    policies: Mapping[str, Policy]
    tenants: frozenset[TenantId] = frozenset()
    shares: QuotaPart | None = None
    whole: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceReport:
    """The state that was sent to an instance, and its refusals."""

    budgets: int
    policies: int
    problems: tuple[str, ...]


@dataclass(slots=True)
class _Sent:
    epoch: Epoch
    budgets: dict[BudgetKey, KvBudget] = field(default_factory=dict)
    given: dict[BudgetKey, QuotaBody] = field(default_factory=dict)
    """What it reported of these, just after it was told: an instance may round them."""
    policies: dict[str, Policy] = field(default_factory=dict)
    shown: dict[str, Policy | None] = field(default_factory=dict)
    """What it said that it runs, just after it was told: an instance may put that in other words."""
    refused: dict[object, tuple[object, str, float]] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)
    silent_until_s: float = 0.0


class Settled(NamedTuple):
    """What the store says of changes of policies. ``known`` is whether it was read and no gateway is in the middle of
    one; ``still``, whether none is being undone either.
    """

    known: bool
    still: bool


class FleetKeeper:
    """The only writer of budgets; ``swap`` writes policies as well, and they exclude each other."""

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        *,
        registry: Registry,
        control: InstanceControl,
        swap: PolicySwap,
        desired: Callable[[], DesiredState],
        settled: Callable[[], Awaitable[Settled]],
        watch: PolicyWatch,
        salt: Callable[[TenantId], str],
        clock: Callable[[], float],
    ) -> None:
        """``settled`` brings what the store says up to date, and returns what it says of changes."""
        self._registry = registry
        self._control = control
        self._swap = swap
        self._desired = desired
        self._salt = salt
        self._clock = clock
        self._settled = settled
        self._watch = watch
        self._looked_s = clock()
        self._sent: dict[InstanceId, _Sent] = {}

    async def run(self) -> None:
        """Keep them at it, for ever."""
        while True:
            await self.round()
            await asyncio.sleep(_INTERVAL_S)

    async def round(self) -> None:
        """Send every instance the state that it lacks."""
        try:
            async with self._swap.exclusive():  # what holds is read in it: who had it before may have changed that
                await self._send()
        except SwapBusyError as error:
            _log.warning("policies and KV budgets can't be sent to instances now: %s; they are sent later", error)

    async def _send(self) -> None:
        present = self._registry.reporting()
        due = self._clock() - self._looked_s >= _LOOK_EVERY_S or self._watch.doubts or any(map(self._is_new, present))
        settled = await self._settled() if due else Settled(known=False, still=False)
        look = settled.known
        if look:
            self._looked_s = self._clock()
        desired = self._desired()
        budgets = {
            (tenant_of_salt(self._salt(tenant)), tier): budget
            for tenant, limits in desired.limits.items()
            for tier, budget in limits.kv.items()
        }
        for removed in self._sent.keys() - {each.id for each in self._registry.all()}:
            del self._sent[removed]
            self._swap.paid(removed)
        await asyncio.gather(
            *(self._keep(each, self._shares(each, desired) | budgets, desired, look=look) for each in present)
        )
        self._watch.keep({each.id for each in self._registry.all()})
        if settled.still and desired.whole:
            await asyncio.gather(*(self._observe(each, desired) for each in present))

    def report(self) -> Mapping[InstanceId, InstanceReport]:
        """Return the state that was sent to each instance."""
        return {
            name: InstanceReport(
                budgets=len(sent.budgets),
                policies=len(sent.policies),
                problems=tuple(reason for _, reason, _ in sent.refused.values()),
            )
            for name, sent in self._sent.items()
        }

    def _is_new(self, instance: Instance) -> bool:
        sent = self._sent.get(instance.id)
        return sent is None or instance.stats is None or sent.epoch != instance.stats.epoch

    def _shares(self, instance: Instance, desired: DesiredState) -> dict[BudgetKey, KvBudget]:
        """The preset's shares of this instance's tiers, for tenants that have no budget of their own there."""
        if desired.shares is None:
            return {}
        shares = share_of(instance, desired.shares)
        return {
            (tenant_of_salt(self._salt(tenant)), tier): budget
            for tenant in desired.tenants
            if (limits := desired.limits.get(tenant)) is None or not limits.kv
            for tier, budget in shares.items()
        }

    async def _keep(self, instance: Instance, budgets: Budgets, desired: DesiredState, *, look: bool) -> None:
        if instance.stats is None:
            return
        sent = self._sent.get(instance.id)
        if sent is None or sent.epoch != instance.stats.epoch:
            if sent is not None:
                self._swap.paid(instance.id)
            sent = self._sent[instance.id] = _Sent(epoch=instance.stats.epoch)
        owed = self._swap.owed(instance.id)
        of_budgets = sent.budgets.keys() | budgets.keys() | {QUOTAS_PATH}
        for key in sent.refused.keys() - of_budgets - desired.policies.keys() - owed.keys():
            del sent.refused[key]
        for kind, policy in {**owed, **desired.policies}.items():
            if look or sent.policies.get(kind) != policy or kind in owed:
                await self._send_policy(instance, sent, policy)
        if look and (of_budgets - {QUOTAS_PATH} or not instance.stats.tiers.keys().isdisjoint(LOWER_TIERS)):
            await self._look_at_budgets(instance, sent, budgets, whole=desired.whole)
        for key in sent.budgets.keys() | budgets.keys():
            if sent.budgets.get(key) != budgets.get(key):
                await self._send_budget(instance, sent, key, budgets.get(key))

    async def _observe(self, instance: Instance, desired: DesiredState) -> None:
        sent = self._sent.get(instance.id)
        if sent is None or self._clock() < sent.silent_until_s or self._swap.owed(instance.id):
            return
        try:
            running = await self._swap.running(instance)
        except InstanceControlError as error:  # it may have no policies; the health checks report one that is away
            if error.silent:
                sent.silent_until_s = self._clock() + self._swap.longest_s
            return
        self._watch.observe(instance.id, sent.epoch, running, desired.policies)

    async def _look_at_budgets(self, instance: Instance, sent: _Sent, budgets: Budgets, *, whole: bool) -> None:
        """Compare an instance's state with the desired one; differences are sent afterwards."""
        if not self._due(sent, QUOTAS_PATH, None):
            return
        try:
            reported = await ask_budgets(self._control, instance)
        except InstanceControlError as error:
            self._refused(instance, sent, QUOTAS_PATH, (None, f"KV budgets can't be read: {error}"), error)
            return
        sent.refused.pop(QUOTAS_PATH, None)
        for key in [key for key in sent.budgets if reported.quotas.get(key) != sent.given.get(key)]:
            del sent.budgets[key]
        for key, quota in reported.quotas.items():
            wanted = budgets.get(key)
            if (wanted is not None and quota == quota_of(wanted)) or (
                wanted is None and whole and key in reported.changed
            ):
                sent.budgets[key], sent.given[key] = budget_of(quota), quota

    async def _send_budget(self, instance: Instance, sent: _Sent, key: BudgetKey, budget: KvBudget | None) -> None:
        if not self._due(sent, key, budget):
            return
        try:
            reported = await send_budget(self._control, instance, key, budget)
        except InstanceControlError as error:
            self._refused(instance, sent, key, (budget, f"KV budget in {key[1]}: {error}"), error)
            return
        sent.refused.pop(key, None)
        sent.budgets.pop(key, None)
        sent.given.pop(key, None)
        if budget is not None:
            sent.budgets[key] = budget
            if (given := reported.quotas.get(key)) is not None:
                sent.given[key] = given

    async def _send_policy(self, instance: Instance, sent: _Sent, policy: Policy) -> None:
        if not self._due(sent, policy.kind, policy):
            return
        try:
            shown = (await self._swap.running(instance)).get(policy.kind)
            known = sent.policies.get(policy.kind) == policy and shown is not None
            right = shown == policy or (known and shown == sent.shown.get(policy.kind))
            if not right:
                await self._swap.send(instance, policy)
                shown = (await self._swap.running(instance)).get(policy.kind)
        except InstanceControlError as error:
            sent.seen.pop(policy.kind, None)
            why = f"policy {policy.name!r} of kind {policy.kind}: {error}"
            self._refused(instance, sent, policy.kind, (policy, why), error)
            return
        sent.refused.pop(policy.kind, None)
        sent.policies[policy.kind] = policy
        sent.shown[policy.kind] = shown
        if policy.kind in self._swap.owed(instance.id):
            sent.seen[policy.kind] = sent.seen.get(policy.kind, 0) + 1 if right else 0
            if sent.seen[policy.kind] >= _SEEN:
                self._swap.paid(instance.id, policy.kind)
                del sent.seen[policy.kind]

    def _due(self, sent: _Sent, key: object, target: object) -> bool:
        now_s = self._clock()
        before = sent.refused.get(key)
        return now_s >= sent.silent_until_s and (before is None or before[0] != target or now_s >= before[2])

    def _refused(
        self, instance: Instance, sent: _Sent, key: object, what: tuple[object, str], error: InstanceControlError
    ) -> None:
        target, reason = what
        if (before := sent.refused.get(key)) is None or before[1] != reason:
            _log.warning("instance %s differs from the stored policies and KV budgets: %s", instance.id, reason)
        again_s = self._clock() + _AGAIN_AFTER_S
        if error.silent:
            again_s = sent.silent_until_s = self._clock() + self._swap.longest_s
        sent.refused[key] = (target, reason, again_s)
