"""Keeps instances at the state in the store: tenants' KV budgets and the fleet's policies.

An engine forgets both when it restarts, and an instance may join at any time. So this is a loop, not an event: once a
second it compares the store with the state that it sent to each usable instance in the instance's present life (its
epoch), and sends the difference. At first, and then every few seconds, it reads the state of each instance: another
sender may have changed it. It removes a budget that the store doesn't have. It shows a refusal, of a stored policy as a
problem, and tries again after a minute or when the desired state changes. It leaves an instance without an answer alone
for a while: a round holds the lock of policy changes, so they wait for that answer, too.
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
from gateway.fleet.policies import Choice, FencedPolicy, Policy, PolicySwap, SwapBusyError
from gateway.fleet.policy_watch import PolicyWatch
from gateway.fleet.refusal import Refusal, report_refusals
from gateway.limits import KvBudget, TenantLimits
from gateway.problems import Problems
from gateway.registry import Instance, Registry
from gateway.types import TenantId
from kvcontrol.core.ids import Epoch, InstanceId
from kvcontrol.core.policy_control import Fence
from kvcontrol.core.tenant import tenant_of_salt
from kvcontrol.core.tier_control import QUOTAS_PATH, QuotaBody
from kvcontrol.presets import QuotaPart

_INTERVAL_S: Final = 1.0
_AGAIN_AFTER_S: Final = 60.0
_COMPARE_EVERY_S: Final = 5.0
_CONFIRMATIONS: Final = 2
"""So often an instance without fences has to report a restored policy: an older call may arrive late."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredState:
    """The desired state of instances. ``shares`` of a preset hold for ``tenants`` without KV budgets. ``whole`` is
    whether all documents could be read: only then the keeper removes state that the store doesn't have.
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
    reported_budgets: dict[BudgetKey, QuotaBody] = field(default_factory=dict)
    """The instance's report of these right after the call: it may round them."""
    policies: dict[str, Policy] = field(default_factory=dict)
    reported_policies: dict[str, Policy | None] = field(default_factory=dict)
    """The instance's report of these right after the call: it may use another name."""
    refused: dict[object, Refusal] = field(default_factory=dict)
    confirmations: dict[str, int] = field(default_factory=dict)
    """How often an instance without fences reported a restored policy, by kind."""
    silent_until_s: float = 0.0


class PolicyChanges(NamedTuple):
    """The pending changes of policies in the store. ``running`` is whether a gateway is in the middle of one;
    ``pending``, whether one is running or is being undone. ``fence`` was the newest fence before they were read.
    """

    running: bool
    pending: bool
    fence: Fence


class _Round(NamedTuple):
    """``compare`` is whether instances are compared with the store; ``watch``, whether the watch compares the kinds
    without a stored policy. ``fence`` is for calls with stored policies; None while a change is running: then none is
    sent.
    """

    compare: bool
    watch: bool
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
        pending: Callable[[Mapping[str, int]], Awaitable[PolicyChanges | None]],
        watch: PolicyWatch,
        problems: Problems,
        salt: Callable[[TenantId], str],
        clock: Callable[[], float],
    ) -> None:
        """``pending`` receives the newest fences of instances by store, brings ``desired`` up to date, and returns the
        pending changes, None where the store can't be read.
        """
        self._registry = registry
        self._control = control
        self._swap = swap
        self._desired = desired
        self._salt = salt
        self._clock = clock
        self._pending = pending
        self._watch = watch
        self._problems = problems
        self._compared_s = clock()
        self._sent: dict[InstanceId, _Sent] = {}
        self._fence: Fence | None = None
        """The newest one at the last read of the store."""
        self._newest: dict[str, int] = {}

    async def run(self) -> None:
        """Run rounds for ever."""
        while True:
            await self.round()
            await asyncio.sleep(_INTERVAL_S)

    async def round(self) -> None:
        """Send every instance the state that it lacks."""
        try:
            async with self._swap.exclusive():  # the store is read in it: the change before may have written there
                await self._send()
        except SwapBusyError as error:
            _log.warning("policies and KV budgets can't be sent to instances now: %s; they are sent later", error)

    async def _send(self) -> None:
        present = self._registry.reporting()
        round_ = await self._read_store(present)
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
        refusals = {each.id: self._sent[each.id].refused for each in present if each.id in self._sent}
        report_refusals(self._problems, refusals, desired.policies)

    async def _read_store(self, present: Sequence[Instance]) -> _Round:
        """Read the store where it is time, or something is to be sent."""
        before = self._desired()
        due = (
            self._clock() - self._compared_s >= _COMPARE_EVERY_S
            or self._watch.is_unconfirmed
            or any(self._is_new(each) or self._lacks(each, before) for each in present)
        )
        if not due:
            return _Round(compare=False, watch=False, fence=self._fence)
        changes = await self._pending(dict(self._newest))
        if changes is None:  # the last read counts; an instance with a newer change refuses its policies
            return _Round(compare=False, watch=False, fence=self._fence)
        if changes.running:
            return _Round(compare=False, watch=False, fence=None)
        self._compared_s, self._fence = self._clock(), changes.fence
        return _Round(compare=True, watch=not changes.pending, fence=changes.fence)

    def _lacks(self, instance: Instance, desired: DesiredState) -> bool:
        sent, restores = self._sent.get(instance.id), self._swap.to_restore(instance.id)
        return sent is not None and any(
            (kind in restores or sent.policies.get(kind) != policy) and self._due(sent, kind, policy)
            for kind, policy in desired.policies.items()
        )

    def report(self) -> Mapping[InstanceId, InstanceReport]:
        """Return the state that was sent to each instance."""
        return {
            name: InstanceReport(
                budgets=len(sent.budgets),
                policies=len(sent.policies),
                problems=tuple(each.reason for each in sent.refused.values()),
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
                self._swap.restored(instance.id)
            sent = self._sent[instance.id] = _Sent(epoch=instance.stats.epoch)
        restores = self._swap.to_restore(instance.id)
        of_budgets = sent.budgets.keys() | budgets.keys() | {QUOTAS_PATH}
        for key in sent.refused.keys() - of_budgets - desired.policies.keys() - restores.keys():
            del sent.refused[key]
        await self._keep_policies(
            instance,
            sent,
            self._policies(instance, sent, desired, compare=round_.compare, fence=round_.fence),
            stored=desired.policies if round_.watch and desired.whole else None,
        )
        if round_.compare and (of_budgets - {QUOTAS_PATH} or not instance.stats.tiers.keys().isdisjoint(LOWER_TIERS)):
            await self._compare_budgets(instance, sent, budgets, whole=desired.whole)
        for key in sent.budgets.keys() | budgets.keys():
            if sent.budgets.get(key) != budgets.get(key):
                await self._send_budget(instance, sent, key, budgets.get(key))

    async def _compare_budgets(self, instance: Instance, sent: _Sent, budgets: Budgets, *, whole: bool) -> None:
        """Compare an instance's state with the desired one; differences are sent afterwards."""
        if not self._due(sent, QUOTAS_PATH, None):
            return
        try:
            reported = await ask_budgets(self._control, instance)
        except InstanceControlError as error:
            self._refused(instance, sent, QUOTAS_PATH, (None, f"KV budgets can't be read: {error}"), error)
            return
        sent.refused.pop(QUOTAS_PATH, None)
        for key in [key for key in sent.budgets if reported.quotas.get(key) != sent.reported_budgets.get(key)]:
            del sent.budgets[key]
        for key, quota in reported.quotas.items():
            wanted = budgets.get(key)
            if (wanted is not None and quota == quota_of(wanted)) or (
                wanted is None and whole and key in reported.changed
            ):
                sent.budgets[key], sent.reported_budgets[key] = budget_of(quota), quota

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
        sent.reported_budgets.pop(key, None)
        if budget is not None:
            sent.budgets[key] = budget
            if (quota := reported.quotas.get(key)) is not None:
                sent.reported_budgets[key] = quota

    def _policies(
        self, instance: Instance, sent: _Sent, desired: DesiredState, *, compare: bool, fence: Fence | None
    ) -> list[FencedPolicy]:
        """Return the policies to compare with those of an instance now, with the fences of calls for them."""
        restores = self._swap.to_restore(instance.id)
        found = []
        for kind, policy in ({kind: each.policy for kind, each in restores.items()} | dict(desired.policies)).items():
            restore, with_fence = restores.get(kind), fence
            if restore is not None and (fence is None or fence.number < restore.fence.number):
                with_fence = restore.fence if policy == restore.policy else None  # the stored one may be older
            if (
                with_fence is not None
                and (compare or restore is not None or sent.policies.get(kind) != policy)
                and self._due(sent, kind, policy)
            ):
                found.append(FencedPolicy(policy=policy, fence=with_fence))
        return found

    async def _keep_policies(
        self, instance: Instance, sent: _Sent, policies: Sequence[FencedPolicy], *, stored: Collection[str] | None
    ) -> None:
        """Look at an instance once, send it the policies that it lacks, and let the watch compare the kinds that are
        not ``stored``; with None the watch compares nothing.
        """
        if not policies and (stored is None or self._clock() < sent.silent_until_s):
            return
        must_restore = bool(self._swap.to_restore(instance.id))
        try:
            choice = await self._swap.look(instance)
        except InstanceControlError as error:  # it may have no policies; health checks report a dead instance
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
        if stored is not None and self._fence is not None and not must_restore:
            self._watch.observe(instance.id, sent.epoch, choice, stored=stored, store=self._fence.store)

    async def _send_policy(self, instance: Instance, sent: _Sent, wanted: FencedPolicy, choice: Choice) -> None:
        policy, fence = wanted.policy, wanted.fence
        kind = policy.kind
        restore = self._swap.to_restore(instance.id).get(kind)
        reported = choice.policies.get(kind)
        known = sent.policies.get(kind) == policy and reported is not None
        right = reported == policy or (known and reported == sent.reported_policies.get(kind))
        fenced = choice.fences is not None
        late = restore is not None and fenced and choice.newest(kind, restore.fence.store) < restore.fence.number
        try:
            if not right or late:
                await self._swap.send(instance, policy, fence)
                reported = (await self._swap.look(instance)).policies.get(kind)
        except InstanceControlError as error:
            sent.confirmations.pop(kind, None)
            if error.status == HTTPStatus.CONFLICT:
                self._overtaken(instance, sent, wanted)
            else:
                self._policy_refused(instance, sent, policy, error)
            return
        sent.refused.pop(kind, None)
        sent.policies[kind] = policy
        sent.reported_policies[kind] = reported
        if restore is not None:
            sent.confirmations[kind] = sent.confirmations.get(kind, 0) + 1 if right else 0
            if fenced or sent.confirmations[kind] >= _CONFIRMATIONS:
                self._swap.restored(instance.id, kind)
                del sent.confirmations[kind]

    def _overtaken(self, instance: Instance, sent: _Sent, wanted: FencedPolicy) -> None:
        """Note that an instance had a newer change: nothing has to be restored there, and the store is read again."""
        kind = wanted.policy.kind
        _log.info("instance %s had a newer change of its policy of kind %s", instance.id, kind)
        sent.policies.pop(kind, None)
        restore = self._swap.to_restore(instance.id).get(kind)
        if restore is not None and restore.fence == wanted.fence:
            self._swap.restored(instance.id, kind)

    def _policy_refused(self, instance: Instance, sent: _Sent, policy: Policy, error: InstanceControlError) -> None:
        sent.confirmations.pop(policy.kind, None)
        why = f"policy {policy.name!r} of kind {policy.kind}: {error}"
        self._refused(instance, sent, policy.kind, (policy, why), error)

    def _due(self, sent: _Sent, key: object, target: object) -> bool:
        now_s = self._clock()
        before = sent.refused.get(key)
        return now_s >= sent.silent_until_s and (before is None or before.target != target or now_s >= before.again_s)

    def _refused(
        self, instance: Instance, sent: _Sent, key: object, what: tuple[object, str], error: InstanceControlError
    ) -> None:
        target, reason = what
        if (before := sent.refused.get(key)) is None or before.reason != reason:
            _log.warning("instance %s differs from the stored policies and KV budgets: %s", instance.id, reason)
        again_s = self._clock() + _AGAIN_AFTER_S
        if error.silent:
            again_s = sent.silent_until_s = self._clock() + self._swap.longest_s
        sent.refused[key] = Refusal(target, reason, again_s, answered=error.status is not None)
