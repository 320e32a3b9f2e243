"""Which prompts a prefill step computes, by LMDeploy's rules: short ones together, long ones alone and chunk by chunk.

Long is a prompt of which more than a step's worth is to be computed, cached tokens left out. While one is computed or
waits, up to three steps of short ones come before its next chunk. Its last chunk, which is short itself, waits for
nobody, and another long one begins after that.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from engines.sim.sequence import SimSequence

Chunk = tuple[SimSequence, int]
"""So many tokens of a sequence's prompt."""
SHORT_STEPS: Final = 3
"""What ``LMDEPLOY_PT_TTFT_SHORT_TURNS`` is where nobody sets it."""


class PrefillOrder:
    """Whose turn it is among prompts that have their places and blocks."""

    def __init__(self, most_tokens: int) -> None:
        self._most = most_tokens
        self._chunked: SimSequence | None = None
        """The long prompt that is under way."""
        self._short_steps = 0
        """Since its last chunk, or since one waits."""

    def take(self, prompts: Iterable[SimSequence]) -> list[Chunk]:
        """Return the next step's chunks, of at least one of these prompts."""
        long: SimSequence | None = None
        shorts: list[Chunk] = []
        for each in prompts:
            rest = each.target - each.computed
            if each is self._chunked:
                if rest <= self._most:
                    self._chunked = None
                    return [(each, rest)]
                long = each
            elif rest <= self._most:
                shorts.append((each, rest))
            elif long is None:
                long = each
        if long is None:
            return self._together(shorts, passing=False)
        if shorts and self._short_steps < SHORT_STEPS:
            self._short_steps += 1
            return self._together(shorts, passing=True)
        self._chunked, self._short_steps = long, 0
        return [(long, self._most)]

    def _together(self, shorts: Sequence[Chunk], *, passing: bool) -> list[Chunk]:
        """As many as go into one step. ``passing``: those behind one that doesn't fit may go before it."""
        found: list[Chunk] = []
        left = self._most
        for each in shorts:
            if each[1] <= left:
                found.append(each)
                left -= each[1]
            elif not passing:
                break
        return found
