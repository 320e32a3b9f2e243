"""Refusals by instances of the state that the keeper sends, and the problems that they are."""

from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from gateway.problems import ProblemKind, Problems
from kvcontrol.core.ids import InstanceId

_STORED_POLICY: Final = "stored policy "
"""Begins the subjects of problems with instances that refuse one."""


class Refusal(NamedTuple):
    """``answered`` is whether the instance refused the target; otherwise it gave no answer."""

    target: object
    reason: str
    again_s: float
    answered: bool


def report_refusals(
    problems: Problems, refusals: Mapping[InstanceId, Mapping[object, Refusal]], kinds: Collection[str]
) -> None:
    """Make the problems those of instances that refuse a stored policy; ``kinds`` are those of the stored policies."""
    problems.replace(
        ProblemKind.POLICY,
        _STORED_POLICY,
        {
            f"{_STORED_POLICY}{kind} of instance {instance}": (
                f"the instance refuses the stored {refused[kind].reason}; instances may run different policies: swap "
                "to a policy that all instances accept, or upgrade this instance"
            )
            for instance, refused in refusals.items()
            for kind in kinds
            if kind in refused and refused[kind].answered
        },
    )
