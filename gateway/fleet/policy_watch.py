"""Reports policies of instances that changed though no change over the fleet was made.

Where no policy is stored, an instance keeps the policy that it was started with. The gateway remembers each instance's
policy while no change is pending in the store. Another policy later comes from a sender that no gateway knows, such as
a gateway that was killed while its call was in flight.
"""

from collections.abc import Collection, Mapping
from typing import Final

from gateway.fleet.policies import Policy
from gateway.problems import ProblemKind, Problems
from kvcontrol.core.ids import Epoch, InstanceId

_SURE: Final = 2
"""A difference is reported once it was seen so often: a change may begin between two reads of the store."""


class PolicyWatch:
    """Compares what instances run with what they ran before."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._lives: dict[InstanceId, Epoch] = {}
        self._before: dict[InstanceId, dict[str, Policy]] = {}
        self._seen: dict[tuple[InstanceId, str], int] = {}

    @property
    def doubts(self) -> bool:
        """Whether a difference was seen that has to be seen again."""
        return any(count < _SURE for count in self._seen.values())

    def keep(self, instances: Collection[InstanceId]) -> None:
        """Forget all instances but these."""
        for gone in self._lives.keys() - set(instances):
            self._forget(gone)
            del self._lives[gone]

    def observe(
        self, instance: InstanceId, epoch: Epoch, running: Mapping[str, Policy], stored: Collection[str]
    ) -> None:
        """Take what an instance runs while no change is pending; kinds with a ``stored`` policy are kept at that."""
        if self._lives.get(instance) != epoch:
            self._forget(instance)
            self._lives[instance] = epoch
        before = self._before.setdefault(instance, {})
        for kind in before.keys() & set(stored):
            del before[kind]
            self._clear(instance, kind)
        for kind, policy in running.items():
            if kind in stored:
                continue
            if before.setdefault(kind, policy) == policy:
                self._clear(instance, kind)
                continue
            count = self._seen[instance, kind] = min(self._seen.get((instance, kind), 0) + 1, _SURE)
            if count == _SURE:
                self._problems.report(
                    ProblemKind.POLICY,
                    _subject(instance, kind),
                    f"it runs {policy.name!r} and ran {before[kind].name!r} before, and no swap by a gateway explains "
                    f"this; swap the policy over the fleet, or restore it with PUT /kv/v1/policy of the instance",
                )

    def _forget(self, instance: InstanceId) -> None:
        for kind in self._before.pop(instance, {}):
            self._clear(instance, kind)

    def _clear(self, instance: InstanceId, kind: str) -> None:
        self._seen.pop((instance, kind), None)
        self._problems.clear(ProblemKind.POLICY, _subject(instance, kind))


def _subject(instance: InstanceId, kind: str) -> str:
    return f"policy {kind} of instance {instance}"
