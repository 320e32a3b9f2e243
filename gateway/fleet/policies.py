"""Changing a policy on all instances, or on none.

Two phases. First the gateway reads the policies of every instance: where it can't read those of one, the change ends
before anything was changed. Then it sends the new policy to all at once; each instance builds the new policy from the
old one's blocks and swaps in one step, or refuses and stays as it was. When one refuses, the gateway restores the
earlier policy of those that have changed. It sends that policy to an instance that did not answer, too: that instance
may have changed. The keeper sends it again until the instance runs it.

So a change takes at most the time of three calls: read, send, restore.

Each call carries a fence of the store, and the calls back a newer one: an instance refuses a call that arrives after a
newer one, however late it comes and whichever gateway sent it. An instance of an earlier version knows no fences.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus

import msgspec

from gateway.fleet.control import InstanceControl, InstanceControlError
from gateway.registry import Instance
from kvcontrol.core.errors import UNREADABLE
from kvcontrol.core.ids import InstanceId
from kvcontrol.core.policy_control import FENCE_LEAP, POLICY_PATH, Fence, FirstPolicy, PolicyChange, PolicyParams


class Step(StrEnum):
    """The outcome of a change on one instance."""

    CHANGED = "changed"
    UNCHANGED = "unchanged"  # it ran this already
    REFUSED = "refused"
    NOT_READ = "not_read"  # its policies could not be read, or those of another instance
    ROLLED_BACK = "rolled_back"
    ROLLBACK_FAILED = "rollback_failed"


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """A policy of some kind by name, with its parameters, as an instance reports it; its other fields are ignored.

    The gateway passes parameters on as they are: an instance of another version may have others than numbers.
    """

    kind: str
    name: str
    params: PolicyParams = {}

    def change(self, fence: Fence | None) -> PolicyChange:
        return PolicyChange(kind=self.kind, name=self.name, params=self.params, fence=fence)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStep:
    """One instance's part: the outcome, the reason, and the earlier policy. ``mistaken`` is whether the instance knows
    no such kind, name or parameters; then nothing has changed there.
    """

    step: Step
    reason: str
    before: Policy | None
    mistaken: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapReport:
    """The whole change. ``done`` when every instance runs the new policy. ``back`` is the fence of a rollback."""

    steps: Mapping[InstanceId, InstanceStep]
    back: Fence | None = None

    @property
    def done(self) -> bool:
        return all(each.step in {Step.CHANGED, Step.UNCHANGED} for each in self.steps.values())

    @property
    def unfinished(self) -> bool:
        """Whether an instance may not have gone back."""
        return any(each.step is Step.ROLLBACK_FAILED for each in self.steps.values())

    @property
    def mistaken(self) -> bool:
        """Whether the change is impossible on every instance, also later."""
        return bool(self.steps) and all(each.mistaken for each in self.steps.values())

    @property
    def why_not(self) -> str:
        """The first reason why it was not done, with the instance."""
        for name, each in self.steps.items():
            if each.reason:
                return f"{name}: {each.reason}"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The policies of an instance by kind, and its available eviction policies and strategies of the schedule, each in
    a few words. ``fences`` are the newest numbers that it knows, by kind and store; None where it knows no fences.
    ``first`` are the policies with which it was started, of kinds that were changed since; an instance of an earlier
    version does not report them.
    """

    policies: Mapping[str, Policy]
    available: Mapping[str, str]
    strategies: Mapping[str, str]
    fences: Mapping[str, Mapping[str, int]] | None
    first: Mapping[str, Policy]

    def newest(self, kind: str, store: str) -> int:
        """Return the newest fence of a store for a kind, 0 if none came."""
        return (self.fences or {}).get(kind, {}).get(store, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FencedPolicy:
    """A policy that an instance has to run, and the fence of the calls for it."""

    policy: Policy
    fence: Fence


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """The policies of instances before a change, and the fences of its calls and of the calls for its rollback."""

    before: Mapping[InstanceId, Policy]
    fence: Fence
    back: Fence


_log = logging.getLogger(__name__)
Noted = Callable[[Mapping[InstanceId, Policy], Collection[Choice]], Awaitable[Note]]
"""Writes the policies before a change into the store, from the running policies and the reports of instances."""


class SwapBusyError(Exception):
    """Another change takes longer than one may."""


class PolicySwap:
    """One change at a time from this process; remembers the policies that instances must run again."""

    def __init__(self, control: InstanceControl) -> None:
        self._control = control
        self._lock = asyncio.Lock()
        self._to_restore: dict[InstanceId, dict[str, FencedPolicy]] = {}
        self._looks: dict[InstanceId, Choice] = {}

    @property
    def longest_s(self) -> float:
        """How long a change takes at most."""
        return _CALLS * self._control.timeout_s

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Exclude other changes of policies while the block runs; raises ``SwapBusyError``."""
        try:
            async with asyncio.timeout(self.longest_s):
                await self._lock.acquire()
        except TimeoutError:
            raise SwapBusyError(f"another policy swap has been running for {self.longest_s:g} s") from None
        try:
            yield
        finally:
            self._lock.release()

    def to_restore(self, instance: InstanceId) -> Mapping[str, FencedPolicy]:
        """Return the policies that an instance must run again, by kind: it did not answer a rollback."""
        return self._to_restore.get(instance, {})

    def must_restore(self, instance: InstanceId, policy: Policy, fence: Fence) -> None:
        """Note that an instance must run a policy again which it ran before an unfinished change."""
        restores = self._to_restore.setdefault(instance, {})
        restores[policy.kind] = FencedPolicy(policy=policy, fence=fence)

    def restored(self, instance: InstanceId, kind: str | None = None) -> None:
        """Note that an instance runs the right policy, of one kind or (a new process) of all."""
        restores = self._to_restore.get(instance, {})
        if kind is not None:
            restores.pop(kind, None)
        if kind is None or not restores:
            self._to_restore.pop(instance, None)

    def forget(self, instance: InstanceId) -> None:
        """Forget an instance that has left."""
        self.restored(instance)
        self._looks.pop(instance, None)

    async def look(self, instance: Instance) -> Choice:
        """Return an instance's active and available policies; raises ``InstanceControlError``."""
        choice = read_policies(await self._control.call(instance, "GET", POLICY_PATH))
        self._looks[instance.id] = choice
        return choice

    async def send(self, instance: Instance, policy: Policy, fence: Fence) -> None:
        """Send a policy to one instance; raises ``InstanceControlError``.

        At the last look the instance may have known no fences, or have reported a number that the store can't have
        issued, for which it would refuse every fence of the store: then the policy is sent without the fence.
        """
        last = self._looks.get(instance.id)  # None: it has left, or was not read
        newest = 0 if last is None else last.newest(policy.kind, fence.store)
        if newest > fence.number + FENCE_LEAP:
            _log.warning(
                "instance %s reports the fence %d of this store for policies of kind %s, which the store, at %d, never "
                "issued; the change is sent without a fence",
                instance.id,
                newest,
                policy.kind,
                fence.number,
            )
        is_fenced = (last is None or last.fences is not None) and newest <= fence.number + FENCE_LEAP
        await self._control.call(instance, "PUT", POLICY_PATH, policy.change(fence if is_fenced else None))

    async def swap(self, instances: Sequence[Instance], policy: Policy, *, noted: Noted) -> SwapReport:
        """Make all instances run ``policy``, or leave them all as they were. The caller has its ``exclusive``.

        Before the first instance is changed, ``noted`` receives the running policy of each and returns the policy for a
        rollback of each. An exception of ``noted`` ends the change. The call also goes to an instance that runs
        ``policy`` already: after it, older calls are refused there.
        """
        reports = await asyncio.gather(*(self._read(each) for each in instances))
        before: dict[InstanceId, Policy] = {}
        choices: list[Choice] = []
        problems: dict[InstanceId, str] = {}
        lacking: set[InstanceId] = set()
        for instance, answer in zip(instances, reports, strict=True):
            if isinstance(answer, InstanceControlError):
                problems[instance.id] = str(answer)
            elif (found := answer.policies.get(policy.kind)) is None:
                known = ", ".join(sorted(answer.policies)) or "none"
                lacking.add(instance.id)
                problems[instance.id] = f"it has no policies of kind {policy.kind!r}; it has {known}"
            else:
                before[instance.id] = found
                choices.append(answer)
        if problems:
            return SwapReport(
                steps={
                    each.id: InstanceStep(
                        step=Step.NOT_READ,
                        reason=problems.get(each.id, ""),
                        before=before.get(each.id),
                        mistaken=each.id in lacking,
                    )
                    for each in instances
                }
            )
        note = await noted(before, choices)
        results = await asyncio.gather(*(self._change(each, policy, before[each.id], note) for each in instances))
        steps = dict(zip((each.id for each in instances), results, strict=True))
        report = SwapReport(steps=steps, back=note.back)
        return report if report.done else await self.roll_back(instances, report)

    async def roll_back(self, instances: Sequence[Instance], report: SwapReport) -> SwapReport:
        """Roll back a change."""

        async def back(instance: Instance) -> InstanceStep:
            done = report.steps[instance.id]
            unknown = done.step is Step.ROLLBACK_FAILED
            if (done.step is not Step.CHANGED and not unknown) or done.before is None or report.back is None:
                return done
            if unknown:
                self.must_restore(instance.id, done.before, report.back)
            try:
                await self.send(instance, done.before, report.back)
            except InstanceControlError as error:
                self.must_restore(instance.id, done.before, report.back)
                return InstanceStep(step=Step.ROLLBACK_FAILED, reason=done.reason or str(error), before=done.before)
            return InstanceStep(step=Step.ROLLED_BACK, reason=done.reason, before=done.before)

        after = await asyncio.gather(*(back(each) for each in instances))
        return SwapReport(steps=dict(zip((each.id for each in instances), after, strict=True)), back=report.back)

    async def _read(self, instance: Instance) -> Choice | InstanceControlError:
        try:
            return await self.look(instance)
        except InstanceControlError as error:
            return error

    async def _change(self, instance: Instance, policy: Policy, ran: Policy, note: Note) -> InstanceStep:
        before = note.before[instance.id]
        try:
            await self.send(instance, policy, note.fence)
        except InstanceControlError as error:
            step = Step.REFUSED if error.sure else Step.ROLLBACK_FAILED
            mistaken = error.status == HTTPStatus.BAD_REQUEST
            return InstanceStep(step=step, reason=str(error), before=before, mistaken=mistaken)
        step = Step.UNCHANGED if ran == before == policy else Step.CHANGED
        return InstanceStep(step=step, reason="", before=before)


_CALLS = 3


class _AllRunning(msgspec.Struct, frozen=True):
    policies: list[Policy]
    available: dict[str, str] = {}
    strategies: dict[str, str] = {}
    fences: dict[str, dict[str, int]] | None = None
    first: dict[str, FirstPolicy] = {}


def read_policies(body: bytes) -> Choice:
    """Read an answer to ``GET /kv/v1/policy``; raises ``InstanceControlError``."""
    try:
        reply = msgspec.json.decode(body, type=_AllRunning)
    except UNREADABLE as error:
        raise InstanceControlError(f"{POLICY_PATH} can't be read: {error}", status=None, sure=True) from None
    return Choice(
        policies={each.kind: each for each in reply.policies},
        available=reply.available,
        strategies=reply.strategies,
        fences=reply.fences,
        first={kind: Policy(kind=kind, name=each.name, params=each.params) for kind, each in reply.first.items()},
    )
