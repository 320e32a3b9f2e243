"""Finds numbers in parsed JSON that JSON can't carry: Python's reader takes ``NaN``, ``Infinity`` and ``1e400``."""

from math import isfinite
from typing import Final, NamedTuple

FINITE: Final = "allowed are finite numbers, up to 1.7e308; JSON has no NaN and no Infinity"
"""What is allowed, for messages."""


class _Step(NamedTuple):
    """A name or position, and the step that leads to its container: paths share their beginnings."""

    name: object
    before: "_Step | None"


def non_finite(value: object) -> str | None:
    """Return the path of a number that is not finite, like ``params.small``; None where there is none.

    ``value`` is what ``json.loads`` returns, nested to any depth. Linear in its size.
    """
    waiting: list[tuple[object, _Step | None]] = [(value, None)]
    while waiting:
        each, step = waiting.pop()
        if isinstance(each, float) and not isfinite(each):
            return _path(step) or "body"
        if isinstance(each, dict):
            waiting += [(inner, _Step(name, step)) for name, inner in each.items()]
        elif isinstance(each, list):
            waiting += [(inner, _Step(number, step)) for number, inner in enumerate(each)]
    return None


def _path(step: _Step | None) -> str:
    names: list[str] = []
    while step is not None:
        names.append(str(step.name))
        step = step.before
    return ".".join(reversed(names))
