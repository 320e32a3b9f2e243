"""Whether an engine's next step computes prompts or tokens, and how many prompt tokens at most.

A step that computes prompts stops all running answers. So it owes them decode steps, and until these are paid no other
prompt is computed:

    budget = target - decode step          what a prefill step may take beside each decode step
    owed   = ceil(prefill seconds / budget)
    chunk  = the most tokens whose seconds are within the budget

With a chunk within the budget one decode step follows it, and no token is later than the target. A prompt can't starve:
the budget is never less than what leaves prompts ``prefill_share`` of the time, at most ``MOST_OWED`` steps are owed,
and no chunk is so small that more than half of its time is fixed cost (launching it, reading its history). Where that
asks for more than the target allows, the target isn't kept, and ``limits`` says so. Where nobody answers, nothing is
owed, and chunks are as long as the engine allows.

Without a target one decode step follows each prefill step, and chunks are the engine's own.

Where the engine can compute a chunk on a second stream of its device, decode steps go on beside it: such a chunk
*overlaps*. It owes nothing, and may have up to ``overlapped_tokens``. Its prompt's last chunk, which gives a token, and
prompts that fit into one chunk can't overlap.

All of it is a function of a snapshot; the debt itself is kept by the caller.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import Final

from kvcontrol.scheduler_ir.pacing.cost import MOST_GROWTH, StepCosts

MOST_OWED: Final = 16
"""Decode steps between two prefill steps, at most: as many as LMDeploy's own rule lets pass."""
_ROUNDING: Final = 1e-9
LAST_TOKENS: Final = 256
"""Tokens of a prompt's last chunk where those before it overlap: few, since answers wait for it."""
_LEAST_USEFUL: Final = 0.5
"""The share of a chunk's time that must depend on its tokens."""


class Reason(StrEnum):
    """Why a step is what it is."""

    NOBODY_ANSWERS = "nobody_answers"
    OWED = "owed"
    OVERLAP = "overlap"
    CHUNK = "chunk"
    PROMPT = "prompt"
    NO_PROMPT = "no_prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What is asked for: an ITL of ``target_s`` at most (0: no target), prompts having ``prefill_share`` of the time at
    least while answers run. Before the rest of a long prompt as many tokens of shorter ones are computed as
    ``overtaken_share`` of its own, at most. A chunk that overlaps with decode steps has at most ``overlapped_tokens``
    (0: none overlaps), and its attention leaves ``reserved_share`` of the device's multiprocessors to them.
    """

    target_s: float = 0.0
    prefill_share: float = 0.25
    overtaken_share: float = 0.0
    overlapped_tokens: int = 0
    reserved_share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveChunk:
    """A long prompt of which a part is computed: what is ``left`` of it, behind so much ``history``, in tokens."""

    left_tokens: int
    history_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """An engine before a step. ``answering`` answers run (only those that want another token), with so much history in
    all. ``is_prompt_due`` is the engine's own rule about those that wait. ``usual_history_tokens`` is what prompts find
    cached, as far as is known before they are matched. ``can_overlap`` says whether the engine has a second stream,
    ``is_overlapping`` whether a chunk is being computed there.
    """

    answering: int
    answering_history_tokens: int = 0
    is_prompt_due: bool = False
    chunk: ActiveChunk | None = None
    usual_history_tokens: int = 0
    debt: int = 0
    can_overlap: bool = False
    is_overlapping: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBounds:
    """A chunk has a multiple of ``block_tokens`` of tokens, or ``most_tokens``."""

    block_tokens: int
    most_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommand:
    """What the next step is: prompts (``is_prefill``) or tokens. New prompts compute ``prompt_tokens`` at most, the
    active chunk ``chunk_tokens``; None leaves these as they are. A chunk that isn't its prompt's last overlaps with
    decode steps where ``overlaps``.
    """

    is_prefill: bool
    reason: Reason
    prompt_tokens: int | None = None
    chunk_tokens: int | None = None
    overlaps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a pace comes down to now: seconds that a prefill step may take beside a decode step (None: no bound), and
    the longest chunk. ``unmet`` says in words what keeps the target from being kept; empty where it is kept.
    """

    budget_s: float | None
    tokens: int
    unmet: str = ""


def decide(view: StepView, pace: Pace, costs: StepCosts, bounds: ChunkBounds) -> StepCommand:
    """Return the next step. O(log of the chunk's tokens)."""
    wants_prompt = view.chunk is not None or view.is_prompt_due
    if not view.answering:
        reason = Reason.NOBODY_ANSWERS if wants_prompt else Reason.NO_PROMPT
        most = bounds.most_tokens
        return StepCommand(is_prefill=wants_prompt, reason=reason, prompt_tokens=most, chunk_tokens=most)
    if view.debt > 0:
        return StepCommand(is_prefill=False, reason=Reason.OWED)
    if view.is_overlapping:
        return StepCommand(is_prefill=False, reason=Reason.OVERLAP)
    if not wants_prompt:
        return StepCommand(is_prefill=False, reason=Reason.NO_PROMPT)
    decode_s = costs.decode_s(view.answering, view.answering_history_tokens)
    prompt_tokens = limits(pace, costs, bounds, decode_s, view.usual_history_tokens).tokens
    overlaps = view.can_overlap and pace.overlapped_tokens > 0
    if view.chunk is None:
        return StepCommand(is_prefill=True, reason=Reason.PROMPT, prompt_tokens=prompt_tokens, overlaps=overlaps)
    found = limits(pace, costs, bounds, decode_s, view.chunk.history_tokens)
    left_tokens = view.chunk.left_tokens
    if overlaps and left_tokens > found.tokens:
        last_tokens = min(found.tokens, LAST_TOKENS)
        chunk_tokens = _whole_blocks(min(pace.overlapped_tokens, left_tokens - last_tokens), bounds)
    else:
        chunk_tokens = found.tokens if found.budget_s is None else _even(left_tokens, found.tokens, bounds)
    return StepCommand(
        is_prefill=True,
        reason=Reason.CHUNK,
        prompt_tokens=prompt_tokens,
        chunk_tokens=chunk_tokens,
        overlaps=overlaps,
    )


def owed(pace: Pace, prefill_s: float | None, decode_s: float | None) -> int:
    """Return the decode steps that a prefill step owes to the answers that waited for it; unknown seconds are None."""
    budget_s = _budget_s(pace, decode_s)
    if budget_s is None or prefill_s is None:
        return 1
    return min(MOST_OWED, max(1, ceil(prefill_s / budget_s - _ROUNDING)))


def limits(pace: Pace, costs: StepCosts, bounds: ChunkBounds, decode_s: float | None, history_tokens: int) -> Limits:
    """Return what a prefill step may take beside decode steps of ``decode_s``, behind so much history."""
    budget_s = _budget_s(pace, decode_s)
    if budget_s is None or decode_s is None:
        return Limits(budget_s=None, tokens=bounds.most_tokens)
    if not costs.longest_tokens:
        return Limits(budget_s=budget_s, tokens=bounds.most_tokens)
    most = min(bounds.most_tokens, max(bounds.block_tokens, costs.longest_tokens * MOST_GROWTH))
    fixed_s = costs.fixed_s(history_tokens)
    useful_s = fixed_s / (1 - _LEAST_USEFUL)
    tokens = _longest_within(max(budget_s, useful_s), costs, bounds, most, history_tokens)
    unmet = ""
    if pace.target_s - decode_s < budget_s:
        unmet = (
            f"a decode step takes {decode_s * 1e3:.1f} ms: prompts have {pace.prefill_share:.0%} of the time, "
            f"in chunks of {tokens} tokens"
        )
    elif (taken_s := costs.chunk_s(tokens, history_tokens) or 0.0) > budget_s:
        unmet = (
            f"a chunk of {tokens} tokens behind {history_tokens} cached ones takes {taken_s * 1e3:.1f} ms and a decode "
            f"step {decode_s * 1e3:.1f} ms, and smaller chunks would compute little else than their fixed cost: "
            f"{owed(pace, taken_s, decode_s)} decode steps follow each chunk"
        )
    return Limits(budget_s=budget_s, tokens=tokens, unmet=unmet)


def _budget_s(pace: Pace, decode_s: float | None) -> float | None:
    if pace.target_s <= 0 or decode_s is None:
        return None
    return max(pace.target_s - decode_s, decode_s * pace.prefill_share / (1 - pace.prefill_share))


def _longest_within(seconds: float, costs: StepCosts, bounds: ChunkBounds, most: int, history_tokens: int) -> int:
    """Return the most tokens that are expected to take no longer; a block at least."""
    if (costs.chunk_s(most, history_tokens) or 0.0) <= seconds:
        return _whole_blocks(most, bounds)
    low, high = 1, max(1, most // bounds.block_tokens)  # in blocks; low is always taken
    while low < high:
        middle = (low + high + 1) // 2
        if (costs.chunk_s(middle * bounds.block_tokens, history_tokens) or 0.0) <= seconds:
            low = middle
        else:
            high = middle - 1
    return _whole_blocks(low * bounds.block_tokens, bounds)


def _even(left_tokens: int, tokens: int, bounds: ChunkBounds) -> int:
    """Return the size of equal chunks that are as few as chunks of ``tokens`` would be."""
    if left_tokens <= tokens:
        return tokens
    size = ceil(left_tokens / ceil(left_tokens / tokens))
    return min(tokens, _whole_blocks(size + bounds.block_tokens - 1, bounds))


def _whole_blocks(tokens: int, bounds: ChunkBounds) -> int:
    if tokens >= bounds.most_tokens:
        return bounds.most_tokens
    return max(min(bounds.block_tokens, bounds.most_tokens), tokens // bounds.block_tokens * bounds.block_tokens)
