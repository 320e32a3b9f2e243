"""What one request came to: how long it took, what it found cached, or why it failed."""

from array import array
from dataclasses import dataclass, field
from enum import StrEnum

_LEAST_LEFT_TOKENS = 16


class HitClass(StrEnum):
    """How much of a prompt its engine had computed before: nothing, some, or all but its last block."""

    MISS = "miss"
    PARTIAL = "partial"
    FULL = "full"

    @classmethod
    def of(cls, *, prompt_tokens: int, cached_tokens: int, block_tokens: int) -> "HitClass":
        """Judge by what the engine reports; full is when no more than one of the trace's blocks was left to compute."""
        if cached_tokens <= 0:
            return cls.MISS
        left = prompt_tokens - cached_tokens
        return cls.FULL if left <= max(block_tokens, _LEAST_LEFT_TOKENS) else cls.PARTIAL


class Ending(StrEnum):
    """How a request ended. ``SHED`` is 429 or 503; ``INTERRUPTED`` is the driver's own doing."""

    OK = "ok"
    SHED = "shed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(slots=True, kw_only=True)
class Answer:
    """Filled while a request runs. Times are seconds since the run began, 0.0 where it never came that far.

    ``due_s`` is when it was to be sent, ``sent_s`` when it was: latencies count from the former, so that a driver or a
    gateway that falls behind is seen in them. ``first_s`` and ``last_s`` are of token events: those with a choice, with
    text or without, but for one that only ends the answer; ``gaps_s`` are the pauses between them. ``why`` names the
    kind of a failure, ``detail`` holds what the target sent of this one.
    """

    number: int
    due_s: float
    sent_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    ended_s: float = 0.0
    gaps_s: "array[float]" = field(default_factory=lambda: array("f"))
    ending: Ending = Ending.INTERRUPTED
    why: str = ""
    detail: str = ""
    asked_tokens: int = 0
    planned_tokens: int = 0
    reusable_tokens: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    matched_tokens: int = 0
    instance: str = ""

    @property
    def ok(self) -> bool:
        return self.ending is Ending.OK

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.due_s

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.due_s

    @property
    def events(self) -> int:
        """How many token events came."""
        return len(self.gaps_s) + 1 if self.first_s else 0

    @property
    def tpot_s(self) -> float:
        """Mean time between its tokens by the usage, 0.0 where there was only one or all came at one moment."""
        return (self.last_s - self.first_s) / (self.completion_tokens - 1) if self.completion_tokens > 1 else 0.0

    @property
    def is_short(self) -> bool:
        """Whether it has fewer tokens than were asked for."""
        return self.completion_tokens < self.asked_tokens

    @property
    def came_at_once(self) -> bool:
        """Whether all of its tokens, several, came at one moment: nothing is known of the time between them."""
        return self.completion_tokens > 1 and self.last_s <= self.first_s
