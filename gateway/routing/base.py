"""What a routing policy is given, and what it answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A usable instance as a policy sees it.

    ``matched_tokens`` of the prompt are known to lie in its cache, ``matched_tiers`` says in which tiers.
    ``expected_tokens`` >= ``matched_tokens`` adds what was just sent there and will be cached shortly. ``in_flight``
    and ``prefill_tokens`` are this gateway's own requests there, ``foreign_requests`` those of others. ``last_turn``
    and ``last_cold_turn`` order the candidates by when they last got any, or an unmatched, request (0: never).
    """

    instance: InstanceId
    matched_tokens: int = 0
    matched_tiers: tuple[CacheTier, ...] = ()
    expected_tokens: int = 0
    in_flight: int = 0
    prefill_tokens: int = 0
    foreign_requests: int = 0
    last_turn: int = 0
    last_cold_turn: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One request to place. ``prompt_tokens`` is None when the prompt has no fingerprint, and ``gap`` then says why.

    ``candidates`` holds at least one.
    """

    prompt_tokens: int | None
    gap: str | None
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """The assumed speeds that turn tokens and requests into seconds."""

    prefill_tokens_per_s: float
    decode_load_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where a request goes. ``basis`` is what decided (``prefix``, ``load``, ``round_robin``), ``reason`` a word from a
    small fixed set that says why, ``cost_s`` the candidates' named costs in seconds where the policy has any.
    """

    candidate: Candidate
    basis: str
    reason: str
    cost_s: Mapping[InstanceId, Mapping[str, float]] = field(default_factory=dict)


class RoutingPolicy(Protocol):
    """A pure function of a query: the same query gives the same decision, and nothing is remembered."""

    name: ClassVar[str]

    def choose(self, query: Query) -> Decision:
        """Return one of the candidates, with the reason."""
        ...


__all__ = ["Candidate", "CostModel", "Decision", "Query", "RoutingPolicy"]
