"""Which prompts a prefill step computes, by LMDeploy's rules: short ones together, long ones alone and chunk by chunk.

Long is a prompt of which more than a step's worth is to be computed, cached tokens left out. While one is computed or
waits, up to three steps of short ones come before its next chunk. Its last chunk is short itself and comes at once.
The next long one begins after it.

Where prompts may be overtaken, one with much less left to compute goes before the rest of a long one
(``kvcontrol.scheduler_ir.pacing.overtaking``), as in an LMDeploy instance with a pace.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from engines.sim.sequence import SimSequence
from kvcontrol.scheduler_ir.pacing import LongPrompt, WaitingPrompt, overtaker

Chunk = tuple[SimSequence, int]
"""So many tokens of a sequence's prompt."""
SHORT_STEPS: Final = 3
"""What ``LMDEPLOY_PT_TTFT_SHORT_TURNS`` is where nobody sets it."""


class PrefillOrder:
    """The order of prompts that have their places and blocks."""

    def __init__(self, most_tokens: int, overtaken_share: float = 0.0) -> None:
        self._most = most_tokens
        self._share = overtaken_share
        self._chunked: SimSequence | None = None
        """The long prompt that is under way."""
        self._parked: list[SimSequence] = []
        """Those that it has overtaken, the last one at the end."""
        self._yields: dict[int, int] = {}
        """Tokens of others that may still go before the rest of a prompt that was overtaken, by its number."""
        self._short_steps = 0
        """Since its last chunk, or since one waits."""

    def active(self, prompts: Sequence[SimSequence]) -> SimSequence | None:
        """Return the long prompt that is under way, None where none is."""
        if self._chunked is not None and self._chunked not in prompts:
            self._chunked = None
        while self._chunked is None and self._parked:
            parked = self._parked.pop()
            self._chunked = parked if parked in prompts else None
        return self._chunked

    def take(
        self, prompts: Sequence[SimSequence], prompt_tokens: int | None = None, chunk_tokens: int | None = None
    ) -> list[Chunk]:
        """Return the next step's chunks, of at least one of these prompts. A prompt is long beyond ``prompt_tokens``;
        the one that is under way is computed in chunks of ``chunk_tokens``; None: as many as a step takes.
        """
        most = prompt_tokens or self._most
        size = chunk_tokens or self._most
        active = self.active(prompts)
        if active is not None and (rest := active.target - active.computed) <= size:
            return self._last(active, rest)
        if active is not None and (other := self._overtaker(active, prompts)) is not None:
            return self._overtake(active, other, most)
        shorts: list[Chunk] = []
        long = active
        for each in prompts:
            rest = each.target - each.computed
            if each is active or each in self._parked:
                continue
            if rest <= most:
                shorts.append((each, rest))
            elif long is None:
                long = each
        if long is None:
            return _together(shorts, most, passing=False)
        if shorts and self._short_steps < SHORT_STEPS:
            self._short_steps += 1
            return _together(shorts, most, passing=True)
        self._chunked, self._short_steps = long, 0
        return [(long, size if long is active else most)]

    def _last(self, active: SimSequence, rest: int) -> list[Chunk]:
        self._chunked = None
        self._yields.pop(active.number, None)
        return [(active, rest)]

    def _overtaker(self, active: SimSequence, prompts: Iterable[SimSequence]) -> SimSequence | None:
        if not self._share:
            return None
        others = [each for each in prompts if each is not active and each not in self._parked]
        place = overtaker(
            self._long(active),
            [self._long(each) for each in self._parked],
            [WaitingPrompt(left_tokens=each.target - each.computed) for each in others],
        )
        return None if place is None else others[place]

    def _overtake(self, active: SimSequence, other: SimSequence, most: int) -> list[Chunk]:
        left = other.target - other.computed
        for each in (active, *self._parked):
            self._yields[each.number] = self._long(each).yields_tokens - left
        if left <= most:
            return [(other, left)]
        self._parked.append(active)
        self._chunked = other
        return [(other, most)]

    def _long(self, prompt: SimSequence) -> LongPrompt:
        left = prompt.target - prompt.computed
        return LongPrompt(left_tokens=left, yields_tokens=self._yields.get(prompt.number, int(left * self._share)))


def _together(shorts: Sequence[Chunk], most: int, *, passing: bool) -> list[Chunk]:
    """As many as go into one step. ``passing``: those behind one that doesn't fit may go before it."""
    found: list[Chunk] = []
    left = most
    for each in shorts:
        if each[1] <= left:
            found.append(each)
            left -= each[1]
        elif not passing:
            break
    return found
