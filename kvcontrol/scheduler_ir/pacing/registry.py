"""The paces that ship, by name, each made with parameters that are checked first."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from kvcontrol.core.shown import shown
from kvcontrol.kv_policy.allowed import PolicyError
from kvcontrol.kv_policy.registry import Parameter, Values, checked
from kvcontrol.scheduler_ir.pacing.pace import Pace

ENGINE_PACE: Final = "lmdeploy"
"""The engine's own rule."""
ALTERNATE: Final = "alternate"
ITL_TARGET: Final = "itl_target"
DEFAULT_TARGET_MS: Final = 55.0
"""What a GPU's engine begins with where nobody says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceKind:
    """One pace that ships, and what may be set."""

    name: str
    summary: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    def values(self, given: Mapping[str, float]) -> Values:
        """Return all parameters, defaults where nothing is given; raises ``PolicyError``."""
        return checked(f"pace {self.name}", self.parameters, given)


_OVERTAKEN: Final = {
    "overtaken_share": Parameter(
        default=1.0,
        least=0,
        most=16,
        meaning="tokens of shorter prompts that go before the rest of a long one at most, per token of its own; "
        "0: prompts in chunks are computed one after the other",
    )
}

_KINDS = (
    PaceKind(
        name=ENGINE_PACE, summary="LMDeploy's own rule: prompts first, while there are many tokens or few answers"
    ),
    PaceKind(
        name=ALTERNATE,
        summary="LMDeploy's rule and chunks, with a decode step after each prefill step",
        parameters=_OVERTAKEN,
    ),
    PaceKind(
        name=ITL_TARGET,
        summary="chunks and decode steps alternate so that tokens are no further apart than a target",
        parameters={
            "itl_target_ms": Parameter(
                default=DEFAULT_TARGET_MS, least=1, most=60_000, meaning="milliseconds from one token to the next"
            ),
            "prefill_share": Parameter(
                default=0.25, least=0.05, most=0.9, meaning="share of the time that prompts have at least"
            ),
            **_OVERTAKEN,
            "overlapped_tokens": Parameter(
                default=2048,
                least=0,
                most=65_536,
                meaning="tokens at most of a chunk that is computed on a second stream of the GPU beside decode steps; "
                "0: no chunk is",
            ),
            "reserved_share": Parameter(
                default=0.18,
                least=0,
                most=0.9,
                meaning="share of the multiprocessors that attention of such a chunk leaves to decode steps",
            ),
        },
    ),
)

PACES: Mapping[str, PaceKind] = MappingProxyType({kind.name: kind for kind in _KINDS})
"""All that ship, by name."""


def make_pace(name: str, parameters: Mapping[str, float] = MappingProxyType({})) -> Pace | None:
    """Return a pace, None for the engine's own rule; raises ``PolicyError``."""
    kind = PACES.get(name)
    if kind is None:
        raise PolicyError(f"unknown pace {shown(name)}; known: {', '.join(PACES)}")
    values = kind.values(parameters)
    if name == ENGINE_PACE:
        return None
    if name == ALTERNATE:
        return Pace(overtaken_share=values["overtaken_share"])
    return Pace(
        target_s=values["itl_target_ms"] / 1e3,
        prefill_share=values["prefill_share"],
        overtaken_share=values["overtaken_share"],
        overlapped_tokens=int(values["overlapped_tokens"]),
        reserved_share=values["reserved_share"],
    )
