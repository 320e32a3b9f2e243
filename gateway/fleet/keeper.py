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
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
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
from gateway.fleet.policies import Choice, Owed, Policy, PolicySwap, SwapBusyError
from gateway.fleet.policy_watch import PolicyWatch
from gateway.limits import KvBudget, TenantLimits
from gateway.registry import Instance, Registry
from gateway.types import TenantId
from kvcontrol.core.ids import Epoch, InstanceId
from kvcontrol.core.policy_control import Fence
from kvcontrol.core.tenant import tenant_of_salt
from kvcontrol.core.tier_control import QUOTAS_PATH, QuotaBody
from kvcontrol.presets import QuotaPart

_INTERVAL_S: Final = 1.0
_AGAIN_AFTER_S: Final = 60.0
_LOOK_EVERY_S: Final = 5.0
_SEEN: Final = 2
"""An instance without fences that owes a policy has to be seen so often to run it: an older call may come late."""

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
    """The changes of policies that the store contains. ``known`` is whether no gateway is in the middle of one;
    ``still``, whether none is being undone either. ``fence`` is the newest one, issued before all that was read.
    """

    known: bool
    still: bool
    fence: Fence


class _Round(NamedTuple):
    """``look`` is whether instances are compared with the store; ``observe``, whether kinds are that it doesn't have.
    ``fence`` is that of the stored policies; None while they may be about to change, and are not sent.
    """

    look: bool
    observe: bool
    fence: Fence | None


class FleetKeeper:
    """The only writer of budgets; ``swap`` writes policies as well, and they exclude each other."""

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        *,
        registry: Registry,
        control: InstanceControl,
        swap: PolicySwap,
        desired: Callable[[], DesiredState],
        settled: Callable[[Mapping[str, int]], Awaitable[Settled | None]],
        watch: PolicyWatch,
        salt: Callable[[TenantId], str],
        clock: Callable[[], float],
    ) -> None:
        """``settled`` receives the newest fences of instances by store, brings ``desired`` up to date, and returns the
        pending changes, None where the store can't be read.
        """
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
        self._fence: Fence | None = None
        """Of what was read of the store last."""
        self._newest: dict[str, int] = {}

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
        round_ = await self._begun(present)
        desired = self._desired()
        budgets = {
            (tenant_of_salt(self._salt(tenant)), tier): budget
            for tenant, limits in desired.limits.items()
            for tier, budget in limits.kv.items()
        }
        for removed in self._sent.keys() - {each.id for each in self._registry.all()}:
            del self._sent[removed]
            self._swap.forget(removed)
        await asyncio.gather(
            *(self._keep(each, self._shares(each, desired) | budgets, desired, round_) for each in present)
        )
        self._watch.keep({each.id for each in self._registry.all()})

    async def _begun(self, present: Sequence[Instance]) -> _Round:
        """Read the store where it is time, or something is to be sent."""
        before = self._desired()
        due = (
            self._clock() - self._looked_s >= _LOOK_EVERY_S
            or self._watch.is_unconfirmed
            or any(self._is_new(each) or self._lacks(each, before) for each in present)
        )
        if not due:
            return _Round(look=False, observe=False, fence=self._fence)
        settled = await self._settled(dict(self._newest))
        if settled is None:  # what was read before holds; an instance refuses it if it had a newer change
            return _Round(look=False, observe=False, fence=self._fence)
        if not settled.known:
            return _Round(look=False, observe=False, fence=None)
        self._looked_s, self._fence = self._clock(), settled.fence
        return _Round(look=True, observe=settled.still, fence=settled.fence)

    def _lacks(self, instance: Instance, desired: DesiredState) -> bool:
        sent, owed = self._sent.get(instance.id), self._swap.owed(instance.id)
        return sent is not None and any(
            (kind in owed or sent.policies.get(kind) != policy) and self._due(sent, kind, policy)
            for kind, policy in desired.policies.items()
        )

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

    async def _keep(self, instance: Instance, budgets: Budgets, desired: DesiredState, round_: _Round) -> None:
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
        await self._keep_policies(
            instance,
            sent,
            self._policies(instance, sent, desired, look=round_.look, fence=round_.fence),
            stored=desired.policies if round_.observe and desired.whole else None,
        )
        if round_.look and (of_budgets - {QUOTAS_PATH} or not instance.stats.tiers.keys().isdisjoint(LOWER_TIERS)):
            await self._look_at_budgets(instance, sent, budgets, whole=desired.whole)
        for key in sent.budgets.keys() | budgets.keys():
            if sent.budgets.get(key) != budgets.get(key):
                await self._send_budget(instance, sent, key, budgets.get(key))

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

    def _policies(
        self, instance: Instance, sent: _Sent, desired: DesiredState, *, look: bool, fence: Fence | None
    ) -> list[Owed]:
        """Return the policies to compare with those of an instance now, with the fences of calls for them."""
        owed = self._swap.owed(instance.id)
        found = []
        for kind, policy in ({kind: each.policy for kind, each in owed.items()} | dict(desired.policies)).items():
            debt, with_fence = owed.get(kind), fence
            if debt is not None and (fence is None or fence.number < debt.fence.number):
                with_fence = debt.fence if policy == debt.policy else None  # what is stored may be older than the debt
            if (
                with_fence is not None
                and (look or debt is not None or sent.policies.get(kind) != policy)
                and self._due(sent, kind, policy)
            ):
                found.append(Owed(policy=policy, fence=with_fence))
        return found

    async def _keep_policies(
        self, instance: Instance, sent: _Sent, policies: Sequence[Owed], *, stored: Collection[str] | None
    ) -> None:
        """Look at an instance once, send it the policies that it lacks, and let the watch compare the kinds that are
        not ``stored``; with None the watch compares nothing.
        """
        if not policies and (stored is None or self._clock() < sent.silent_until_s):
            return
        in_debt = bool(self._swap.owed(instance.id))
        try:
            choice = await self._swap.look(instance)
        except InstanceControlError as error:  # it may have no policies; health checks report an instance that is away
            if error.silent:
                sent.silent_until_s = self._clock() + self._swap.longest_s
            for each in policies:
                self._policy_refused(instance, sent, each.policy, error)
            return
        for by_store in (choice.fences or {}).values():
            for store, number in by_store.items():
                self._newest[store] = max(number, self._newest.get(store, 0))
        for each in policies:
            if self._due(sent, each.policy.kind, each.policy):
                await self._send_policy(instance, sent, each, choice)
        if stored is not None and self._fence is not None and not in_debt:
            self._watch.observe(instance.id, sent.epoch, choice, stored=stored, store=self._fence.store)

    async def _send_policy(self, instance: Instance, sent: _Sent, wanted: Owed, choice: Choice) -> None:
        policy, fence = wanted.policy, wanted.fence
        kind = policy.kind
        debt = self._swap.owed(instance.id).get(kind)
        shown = choice.policies.get(kind)
        known = sent.policies.get(kind) == policy and shown is not None
        right = shown == policy or (known and shown == sent.shown.get(kind))
        fenced = choice.fences is not None
        late = debt is not None and fenced and choice.newest(kind, debt.fence.store) < debt.fence.number
        try:
            if not right or late:
                await self._swap.send(instance, policy, fence)
                shown = (await self._swap.look(instance)).policies.get(kind)
        except InstanceControlError as error:
            sent.seen.pop(kind, None)
            if error.status == HTTPStatus.CONFLICT:
                self._overtaken(instance, sent, wanted)
            else:
                self._policy_refused(instance, sent, policy, error)
            return
        sent.refused.pop(kind, None)
        sent.policies[kind] = policy
        sent.shown[kind] = shown
        if debt is not None:
            sent.seen[kind] = sent.seen.get(kind, 0) + 1 if right else 0
            if fenced or sent.seen[kind] >= _SEEN:
                self._swap.paid(instance.id, kind)
                del sent.seen[kind]

    def _overtaken(self, instance: Instance, sent: _Sent, wanted: Owed) -> None:
        """Take notice of a newer change: it settles a debt, and what is stored is read again."""
        kind = wanted.policy.kind
        _log.info("instance %s had a newer change of its policy of kind %s", instance.id, kind)
        sent.policies.pop(kind, None)
        debt = self._swap.owed(instance.id).get(kind)
        if debt is not None and debt.fence == wanted.fence:
            self._swap.paid(instance.id, kind)

    def _policy_refused(self, instance: Instance, sent: _Sent, policy: Policy, error: InstanceControlError) -> None:
        sent.seen.pop(policy.kind, None)
        why = f"policy {policy.name!r} of kind {policy.kind}: {error}"
        self._refused(instance, sent, policy.kind, (policy, why), error)

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
