"""Reports policies of instances that changed though no change over the fleet was made.

Where no policy is stored, an instance keeps the policy with which it was started. An instance of an earlier version
does not report that policy: the gateway remembers the first one that it saw there. Another policy, seen while no change
is pending in the store, comes from a sender that the store does not know: an operator at the instance's own
``/kv/v1/policy``, a late call of a killed gateway, or the gateways of a store that was lost.
"""

from collections.abc import Collection
from typing import Final

from gateway.fleet.policies import Choice, Policy
from gateway.problems import ProblemKind, Problems
from kvcontrol.core.ids import Epoch, InstanceId

_SURE: Final = 2
"""A difference is reported once it was seen so often: a change may begin between two reads of the store."""


class PolicyWatch:
    """Compares the running policies of instances with those of their start."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._lives: dict[InstanceId, Epoch] = {}
        self._before: dict[InstanceId, dict[str, Policy]] = {}
        self._seen: dict[tuple[InstanceId, str], int] = {}

    @property
    def is_unconfirmed(self) -> bool:
        """Whether a difference was seen once and has to be seen again."""
        return any(count < _SURE for count in self._seen.values())

    def keep(self, instances: Collection[InstanceId]) -> None:
        """Forget all instances but these."""
        for gone in self._lives.keys() - set(instances):
            self._forget(gone)
            del self._lives[gone]

    def observe(
        self, instance: InstanceId, epoch: Epoch, choice: Choice, *, stored: Collection[str], store: str
    ) -> None:
        """Compare the policies of an instance while no change is pending in ``store``, except the ``stored`` kinds:
        those are the keeper's.
        """
        if self._lives.get(instance) != epoch:
            self._forget(instance)
            self._lives[instance] = epoch
        before = self._before.setdefault(instance, {})
        for kind in before.keys() & set(stored):
            del before[kind]
            self._clear(instance, kind)
        for kind, policy in choice.policies.items():
            if kind in stored:
                continue
            if before.setdefault(kind, choice.first.get(kind, policy)) == policy:
                self._clear(instance, kind)
                continue
            count = self._seen[instance, kind] = min(self._seen.get((instance, kind), 0) + 1, _SURE)
            if count == _SURE:
                self._problems.report(
                    ProblemKind.POLICY, _subject(instance, kind), _message(policy, before[kind], choice, store)
                )

    def _forget(self, instance: InstanceId) -> None:
        for kind in self._before.pop(instance, {}):
            self._clear(instance, kind)

    def _clear(self, instance: InstanceId, kind: str) -> None:
        self._seen.pop((instance, kind), None)
        self._problems.clear(ProblemKind.POLICY, _subject(instance, kind))


def _subject(instance: InstanceId, kind: str) -> str:
    return f"policy {kind} of instance {instance}"


def _message(policy: Policy, before: Policy, choice: Choice, store: str) -> str:
    stores = (choice.fences or {}).get(policy.kind, {})
    if stores and store not in stores:
        cause = (
            "the change came from the gateways of another store: if this store replaced that one and is empty, restore "
            "the backup of that one, or"
        )
    else:
        cause = "the store contains no swap that explains this (a restored backup may lack it):"
    return (
        f"it runs {policy.name!r} and ran {before.name!r} before, and no policy of kind {policy.kind} is stored; "
        f"{cause} swap the policy over the fleet, or restore it with PUT /kv/v1/policy of the instance"
    )
