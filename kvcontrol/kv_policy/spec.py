"""A policy with its parameters, as people write it: ``mq(lifetime=2, ghosts=8)``."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvcontrol.core.shown import shown
from kvcontrol.kv_policy.allowed import PolicyError
from kvcontrol.kv_policy.eviction import EvictionPolicy
from kvcontrol.kv_policy.registry import make_policy

_WRITTEN = re.compile(r"(?P<name>[^\s(),]+)(?:\s*\((?P<parameters>[^()]*)\))?")
_SIGNS = re.compile(r"[(),]")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """A policy with its parameters; ``text`` is the notation without spaces. Only ``make`` checks that the policy
    exists.
    """

    text: str
    name: str
    parameters: Mapping[str, float]

    def make(self, *, capacity_blocks: int) -> EvictionPolicy:
        """Return an empty policy for so many blocks; raises ``PolicyError``."""
        return make_policy(self.name, capacity_blocks=capacity_blocks, parameters=self.parameters)


def parse_spec(text: str) -> PolicySpec:
    """Read one policy; ``PolicyError`` where it isn't written like ``name`` or ``name(parameter=number, ...)``."""
    written = _WRITTEN.fullmatch(text.strip())
    if written is None:
        raise PolicyError(f"{shown(text.strip())} is not written like name or name(parameter=number, ...)")
    parameters: dict[str, float] = {}
    for part in (written["parameters"] or "").split(","):
        if not part.strip():
            continue
        name, is_there, number = (each.strip() for each in part.partition("="))
        try:
            value = float(number)
        except ValueError:
            value = None
        if not is_there or not name or value is None:
            raise PolicyError(f"{shown(text.strip())}: {shown(part.strip())} is not written like parameter=number")
        if name in parameters:
            raise PolicyError(f"{shown(text.strip())} sets {shown(name)} twice")
        parameters[name] = value
    return PolicySpec(text="".join(text.split()), name=written["name"], parameters=parameters)


def parse_specs(text: str) -> tuple[PolicySpec, ...]:
    """Read policies with commas between them; raises ``PolicyError``, also for one that is named twice.

    O(characters): what is written may come from anybody.
    """
    choices: dict[str, PolicySpec] = {}
    for part in _parts(text):
        if part.strip():
            choice = parse_spec(part)
            if choice.text in choices:
                raise PolicyError(f"policy {choice.text} is named twice")
            choices[choice.text] = choice
    if not choices:
        raise PolicyError("no policy is named")
    return tuple(choices.values())


def _parts(text: str) -> Iterator[str]:
    """Yield the parts between commas outside of parentheses."""
    begin, is_inside = 0, False
    for sign in _SIGNS.finditer(text):
        if sign[0] != ",":
            is_inside = sign[0] == "("
        elif not is_inside:
            yield text[begin : sign.start()]
            begin = sign.end()
    yield text[begin:]
