"""Which waiting prompt is computed before the rest of a long one.

A long prompt is computed in chunks, one long prompt at a time: a prompt with little left to compute would wait behind
all chunks of one with much left. So between two chunks a waiting prompt may overtake, shortest remaining prefill first:

    overtakes    MUCH_FEWER * left(waiting) <= left(active prompt)
    bound        overtaken(prompt) + left(waiting) <= share * left(prompt) when it was first overtaken

The bound holds for the active prompt and for each prompt that was overtaken and is not computed to its end yet. A
prompt can't starve: with a share of 1 it takes at most twice as long. A prompt never overtakes a more important one.

Source: shortest remaining processing time (Schrage, Operations Research 1968), with a bound on what is overtaken in
place of ageing by time: tokens don't depend on how busy the engine is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MUCH_FEWER: Final = 2
"""A prompt overtakes one that has at least so many times its tokens left: less gains little, and each may be wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongPrompt:
    """A prompt of which chunks are computed: tokens that are left, and how many of others may still go before them."""

    left_tokens: int
    yields_tokens: int
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingPrompt:
    """A prompt that waits: the tokens that are left once what is known to be cached was found."""

    left_tokens: int
    priority: int = 0


def overtaker(active: LongPrompt, overtaken: Sequence[LongPrompt], waiting: Sequence[WaitingPrompt]) -> int | None:
    """Return the place of the waiting prompt that goes before the next chunk of ``active``, None for the chunk.

    ``overtaken`` are the prompts that ``active`` has overtaken itself. Of equals the first. O(waiting + overtaken).
    """
    behind = (active, *overtaken)
    most = min(active.left_tokens // MUCH_FEWER, *(prompt.yields_tokens for prompt in behind))
    least = max(prompt.priority for prompt in behind)
    allowed = (
        (prompt.left_tokens, place)
        for place, prompt in enumerate(waiting)
        if 0 < prompt.left_tokens <= most and prompt.priority >= least
    )
    return min(allowed, default=(0, None))[1]
