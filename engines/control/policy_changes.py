"""A change of ``/kv/v1/policy``: parsed and checked on arrival, before the engine's thread receives it.

All raise ``RefusedError`` or ``PolicyError``, which say what is allowed.
"""

import json
from collections.abc import Mapping

import msgspec

from engines.control.errors import RefusedError
from kvcontrol.core.errors import UNREADABLE
from kvcontrol.core.finite import FINITE, non_finite
from kvcontrol.core.policy_control import PolicyChange
from kvcontrol.kv_policy.spec import PolicySpec
from kvcontrol.scheduler_ir.pacing import make_pace
from kvcontrol.scheduler_ir.strategies import make_strategy


def change_of(body: bytes) -> PolicyChange:
    """Return the change in a body."""
    try:
        return msgspec.json.decode(body or b"{}", type=PolicyChange)
    except UNREADABLE as error:
        if (path := _non_finite(body)) is not None:
            raise RefusedError(f"{path} is no finite number; {FINITE}") from error
        raise RefusedError(f"invalid body: {error}") from error


def _non_finite(body: bytes) -> str | None:
    try:
        return non_finite(json.loads(body))
    except (ValueError, RecursionError):
        return None


def strategy_of(change: PolicyChange) -> PolicySpec:
    """Return the strategy of the schedule that a change names; there is one with such parameters."""
    if change.tier is not None:
        raise RefusedError(f"a strategy of the schedule has no tier; leave out {change.tier!r}")
    choice = PolicySpec(text=change.name, name=change.name, parameters=_numbers(change))
    make_strategy(choice.name, choice.parameters)  # is there such a strategy?
    return choice


def pace_of(change: PolicyChange) -> PolicySpec:
    """Return the pace that a change names; there is one with such parameters."""
    if change.tier is not None:
        raise RefusedError(f"a pace has no tier; leave out {change.tier!r}")
    choice = PolicySpec(text=change.name, name=change.name, parameters=_numbers(change))
    make_pace(choice.name, choice.parameters)  # is there such a pace?
    return choice


def policy_of(change: PolicyChange) -> PolicySpec:
    """Return the eviction policy that a change names; there is one with such parameters."""
    choice = PolicySpec(text=change.name, name=change.name, parameters=_numbers(change))
    choice.make(capacity_blocks=1)  # is there such a policy?
    return choice


def _numbers(change: PolicyChange) -> Mapping[str, float]:
    numbers: dict[str, float] = {}
    for name, value in change.params.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RefusedError(f"params: {name} is {value!r}; policies take numbers")
        try:
            numbers[name] = float(value)
        except OverflowError:
            raise RefusedError(f"params: {name} has {len(str(value))} digits; numbers up to 1e308 are taken") from None
    return numbers
