"""Watches the shadow policies of the fleet, and swaps by rule where operators want that.

Once a period the counters of all instances are read. What they come to is evidence (``fleet/evidence.py``), shown by
``/admin/v1/policies/shadow``; with ``auto_policy`` the rule (``fleet/auto_rule.py``) acts on it, in the same two phases
and with the same entries in the audit log as an operator, as the actor ``auto``.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from gateway.api.admin.changes import Changes
from gateway.fleet import InstanceControl, InstanceControlError, Policy, PolicySwap, SwapBusyError
from gateway.fleet.auto_rule import AutoRule, Decision
from gateway.fleet.evidence import Counted, ShadowEvidence
from gateway.registry import Instance, Registry
from gateway.state import ABSENT, Action, Kind, Put, StoreError
from gateway.state.bodies import PolicyBody
from gateway.state.stored import written
from kvcontrol.core.errors import UNREADABLE
from kvcontrol.core.ids import InstanceId
from kvcontrol.core.policy_control import POLICY_PATH, PolicyReport
from kvcontrol.kv_policy import PolicyError
from kvcontrol.kv_policy.spec import PolicySpec, parse_spec

EVICTION: Final = "eviction"
_SHADOW: Final = "shadow"
_SWAP: Final = "swap"
_TARGET: Final = f"policies/{EVICTION}"

_log = logging.getLogger(__name__)


class AutoSwap:
    """See the module's text. ``active`` is whether it may swap; the evidence is collected in any case."""

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        *,
        changes: Changes,
        registry: Registry,
        control: InstanceControl,
        swap: PolicySwap,
        clock: Callable[[], float],
        active: bool,
        period_s: float,
        dwell_s: float,
    ) -> None:
        self._changes = changes
        self._registry = registry
        self._control = control
        self._swap = swap
        self._clock = clock
        self._rule = AutoRule(dwell_s=dwell_s)
        self._period_s = period_s
        self.active = active
        self.evidence = ShadowEvidence()
        self.in_charge: str | None = None
        """The candidate that all instances run, as it is written among them; None where they differ or none is."""

    async def run(self) -> None:
        """Do a round every period, for ever."""
        while True:
            await self.round()
            await asyncio.sleep(self._period_s)

    async def round(self) -> None:
        """Read the counters and do what the rule decides."""
        instances = self._registry.reporting()
        reports = await asyncio.gather(*(self._read(each) for each in instances))
        known = {each.id: report for each, report in zip(instances, reports, strict=True) if report is not None}
        now_s = self._clock()
        self.evidence.observe(now_s, {name: _counted(report) for name, report in known.items()})
        self.in_charge = _same_in_charge(known)
        if not self.active or self.in_charge is None or len(known) < len(instances):
            return
        decision = self._rule.decide(now_s, self.in_charge, self.evidence)
        if decision is None:
            return
        if await self._carry_out(decision, instances):
            self._rule.swapped(now_s, decision)
            self.in_charge = decision.policy
        else:
            self._rule.refused(now_s)

    async def _read(self, instance: Instance) -> PolicyReport | None:
        try:
            return msgspec.json.decode(await self._control.call(instance, "GET", POLICY_PATH), type=PolicyReport)
        except (InstanceControlError, *UNREADABLE) as error:
            _log.info("shadow policies of instance %s can't be read: %s", instance.id, error)
            return None

    async def _carry_out(self, decision: Decision, instances: Sequence[Instance]) -> bool:
        """Swap on all instances or on none, and return whether that was done."""
        try:
            async with self._swap.exclusive():
                done = await self._swap_all(decision, instances)
        except (SwapBusyError, StoreError) as error:
            _log.warning("automatic swap to %s was not made: %s; it is decided again", decision.policy, error)
            return False
        if done:
            _log.warning("swapped eviction policy: %s%s", decision.reason, " (undone)" if decision.undo else "")
        return done

    async def _swap_all(self, decision: Decision, instances: Sequence[Instance]) -> bool:
        store = self._changes.store
        spec = parse_spec(decision.policy)
        body = PolicyBody(name=spec.name, params=dict(spec.parameters))
        policy = Policy(kind=EVICTION, name=body.name, params=body.params)
        present = await store.document(Kind.POLICY, EVICTION)
        detail = body.model_dump(mode="json") | {"reason": decision.reason, "undo": decision.undo}
        async with self._changes.operation(_RULE, _SWAP, _TARGET, detail, undone="rolled_back") as operation:
            noted = partial(self._changes.operations.note_policies, operation)
            report = await self._swap.swap(instances, policy, noted=noted)
            operation.unfinished = report.unfinished
            if not report.done:
                refused = detail | {"why_not": report.why_not}
                await self._changes.end(operation, _RULE.action(_SWAP, _TARGET, refused, outcome="rolled_back"))
                _log.warning("automatic swap to %s was not made: %s", decision.policy, report.why_not)
                return False
            expected = ABSENT if present is None else present.version
            change = Put(kind=Kind.POLICY, name=EVICTION, body=written(body, present), expected=expected)
            try:
                await store.apply([change], action=_RULE.action(_SWAP, _TARGET, detail), completes=operation.number)
            except BaseException:
                back = await self._swap.roll_back(instances, report)
                operation.unfinished = back.unfinished  # an operator's change came first, or the store is away
                raise
            self._changes.operations.over(operation)
        await self._changes.refresh()
        return True


class _Rule:
    """The author of automatic swaps."""

    def action(
        self, action: str, target: str, detail: Mapping[str, Any] | None = None, *, outcome: str = "done"
    ) -> Action:
        return Action(actor="auto", action=action, target=target, outcome=outcome, detail=json.dumps(detail or {}))


_RULE: Final = _Rule()


def _counted(report: PolicyReport) -> dict[str, Counted]:
    return {
        each.policy: Counted(each.lookups, each.hits)
        for policy in report.policies
        if policy.kind == _SHADOW and policy.shadow is not None
        for each in policy.shadow.standings
    }


def _same_in_charge(reports: Mapping[InstanceId, PolicyReport]) -> str | None:
    """Return the candidate that is in charge of HBM everywhere, as it is written; None where there is none."""
    found = {_in_charge(report) for report in reports.values()}
    return found.pop() if len(found) == 1 else None


def _in_charge(report: PolicyReport) -> str | None:
    running = next((each for each in report.policies if each.kind == EVICTION), None)
    if running is None:
        return None
    for text in _counted(report):
        spec = _spec(text)
        if spec is not None and (spec.name, dict(spec.parameters)) == (running.name, dict(running.params)):
            return text
    return None


def _spec(text: str) -> PolicySpec | None:
    """Return a candidate of an instance; None for one that this version can't read."""
    try:
        return parse_spec(text)
    except PolicyError:
        return None
