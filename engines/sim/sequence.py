"""A request in a simulated engine, and what becomes of it."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from engines.requests.urgency import ORDINARY, Urgency
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.tenant import SHARED_TENANT
from kvcontrol.prefix_reuse import PromptChain


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRequest:
    """``chain`` has the names of the prompt's full blocks, and of those that the answer will fill, where that is known.

    ``output_tokens`` >= 1 are generated, no more and no fewer.
    """

    request_id: str
    chain: PromptChain
    prompt_tokens: int
    output_tokens: int
    tenant: str = SHARED_TENANT
    urgency: Urgency = ORDINARY


class Phase(StrEnum):
    """Where a sequence is."""

    ARRIVING = "arriving"
    WAITING = "waiting"
    LOADING = "loading"
    PREFILLING = "prefilling"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class SimSequence:
    """One request's state; the engine alone changes it.

    ``computed`` tokens are in KV; ``attached`` blocks of its path are cached and held by it, ``own`` slots follow on
    them. ``target`` tokens are to be computed before the next one comes: the prompt, or after a preemption prompt and
    answer so far. ``joined_at`` and ``context`` say at which decode step it joined, with how many tokens in KV.
    ``last_token_s`` is when the latest token of one came that was preempted.
    """

    request: SimRequest
    number: int
    arrived_s: float
    target: int
    phase: Phase = Phase.WAITING
    computed: int = 0
    attached: int = 0
    own: list[int] = field(default_factory=list)
    generated: int = 0
    joined_at: int = 0
    context: int = 0
    cached_tokens: int = 0
    cached_by_tier: dict[CacheTier, int] = field(default_factory=dict)
    preempted: int = 0
    last_token_s: float = 0.0
    first_token_s: float | None = None
    ended_s: float | None = None


class Listener(Protocol):
    """Hears of sequences, at the moment of the engine's clock when it happens."""

    def produced(self, sequence: SimSequence, tokens: int, now_s: float) -> None:
        """So many more tokens have come; the first ones are ``sequence.generated == tokens``."""

    def ended(self, sequence: SimSequence, now_s: float) -> None:
        """All have."""
