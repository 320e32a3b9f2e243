"""How long an engine's steps take, by coefficients that were fitted to measurements.

    front        = front_s + prompt tokens x front_token_s
    prefill step = step_s + sum over its chunks of (n x token_s + n x (c + n / 2) x pair_s + c x context_s)
    decode step  = decode_step_s + sequences x sequence_s + their contexts x decode_context_s

The front is what a request takes outside of the engine's steps, one request after the other: HTTP, template, tokens,
the api_server's loop. A chunk that overlaps with decode steps takes ``overlap_chunk`` times as long, and they take
``overlap_decode`` times as long meanwhile.

``n`` is a chunk's tokens and ``c`` what its sequence has in KV already: computing is linear in tokens, attention in
pairs of tokens, and reading the KV of a long prefix costs something too. A span of k decode steps is a sum of an
arithmetic series, so it costs no more to work out than one step.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Final

_MOST_S: Final = 3600.0
"""Of a step, a token or a pair of tokens: far above what any engine takes, far below what a sum could not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeModel:
    """See the module's text; all in seconds. ``ValueError`` unless steps take time and nothing is below 0."""

    step_s: float
    token_s: float
    pair_s: float
    context_s: float
    decode_step_s: float
    sequence_s: float
    decode_context_s: float
    front_s: float = 0.0
    front_token_s: float = 0.0
    overlap_chunk: float = 1.0
    overlap_decode: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value <= _MOST_S:
                raise ValueError(f"{field.name} is {value}; allowed is 0 to {_MOST_S:g} seconds")
        for name in ("overlap_chunk", "overlap_decode"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; what overlaps takes as long at least, so it is >= 1"
                )
        for name in ("step_s", "decode_step_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; a step takes time, so it must be > 0")

    def before_s(self, prompt_tokens: int) -> float:
        """Return what a request takes before it reaches the engine's steps."""
        return self.front_s + prompt_tokens * self.front_token_s

    def chunk_s(self, tokens: int, context: int) -> float:
        """Return what one chunk of a prompt adds to its step."""
        return tokens * self.token_s + tokens * (context + tokens / 2) * self.pair_s + context * self.context_s

    def prefill_s(self, chunks: Iterable[tuple[int, int]]) -> float:
        """Return how long a step takes that computes chunks of (tokens, context)."""
        return self.step_s + sum([self.chunk_s(tokens, context) for tokens, context in chunks])

    def prompt_s(self, tokens: int, context: int, most_tokens: int) -> float:
        """Return how long a prompt of ``tokens`` after ``context`` takes alone, in chunks of ``most_tokens``."""
        seconds = 0.0
        while tokens > 0:
            chunk = min(tokens, most_tokens)
            seconds += self.prefill_s([(chunk, context)])
            tokens -= chunk
            context += chunk
        return seconds

    def span_s(self, steps: int, sequences: int, context: int) -> float:
        """Return how long so many decode steps take; ``context`` are the tokens in KV of all sequences at the first."""
        first = self.decode_step_s + sequences * self.sequence_s + context * self.decode_context_s
        return steps * first + sequences * self.decode_context_s * (steps * (steps - 1) / 2)

    def steps_within(self, seconds: float, sequences: int, context: int) -> int:
        """Return how many decode steps are over after ``seconds``: the inverse of ``span_s``, rounded down."""
        if seconds <= 0:
            return 0
        slope = sequences * self.decode_context_s / 2
        first = self.decode_step_s + sequences * self.sequence_s + context * self.decode_context_s - slope
        if slope * seconds > 1e-9 * first * first:
            steps = int((math.sqrt(first * first + 4 * slope * seconds) - first) / (2 * slope))
        else:
            steps = int(seconds / (first + slope))
        # The root is a float's: put it right where it is off by one.
        while steps and self.span_s(steps, sequences, context) > seconds:
            steps -= 1
        while self.span_s(steps + 1, sequences, context) <= seconds:
            steps += 1
        return steps
