"""How long an engine's steps take, learnt from the steps that it measured.

    prefill seconds = a + b * tokens + c * (token, earlier token) pairs + d * history tokens
    decode seconds  = a + b * sequences + c * history tokens

The weights are never negative and are those with the least squared *relative* error, in which older steps fade. By
relative error a step that took a hundred times as long (kernels were compiled, another process had the device) weighs
almost nothing beside ordinary ones, and a short chunk counts as much as a long one. Where all steps look alike, the
constant explains them, and what was explained before stays explained in the same way (each fit starts from the last
one): so the model expects too little of much larger steps rather than too much, and whoever trusts it doesn't grow
faster than ``MOST_GROWTH`` beyond what was seen.

Source: coordinate descent for non-negative least squares (Franc et al., CAIP 2005); recursive sums with forgetting.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

MOST_GROWTH: Final = 4
"""A chunk of more than so many times the tokens of the longest measured one is not chosen."""
_KEPT: Final = 0.98
"""Of the weight of a step, at the next one: half after 34."""
_SWEEPS: Final = 24
_FEW_PREFILLS: Final = 8
_FEW_DECODES: Final = 64
_SAMPLED_PAUSES: Final = 32
_LEAST_S: Final = 1e-6


class LearntCost:
    """Seconds as a non-negative sum of features, each with its weight. O(features^2) a call: the sums are kept at each
    step, the weights worked out when they are asked for.
    """

    def __init__(self, features: int) -> None:
        self._products = [[0.0] * features for _ in range(features)]
        self._targets = [0.0] * features
        self._weights = [0.0] * features
        self._is_stale = False
        self.seen = 0

    @property
    def weights(self) -> list[float]:
        if self._is_stale:
            self._is_stale = False
            for _ in range(_SWEEPS):
                self._sweep()
        return self._weights

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Take in a measured step; times that can't be are left out."""
        if not _LEAST_S <= seconds < float("inf"):
            return
        scaled = [value / seconds for value in features]
        for row, left in zip(self._products, scaled, strict=True):
            for place, right in enumerate(scaled):
                row[place] = row[place] * _KEPT + left * right
        self._targets = [value * _KEPT + each for value, each in zip(self._targets, scaled, strict=True)]
        self.seen += 1
        self._is_stale = True

    def predict(self, features: Sequence[float]) -> float | None:
        """Return the expected seconds, None before the first step."""
        if not self.seen:
            return None
        return sum(weight * value for weight, value in zip(self.weights, features, strict=True))

    def _sweep(self) -> None:
        weights = self._weights
        for place, row in enumerate(self._products):
            own = row[place]
            if own > 0:
                others = sum(each * weight for each, weight in zip(row, weights, strict=True)) - own * weights[place]
                weights[place] = max(0.0, (self._targets[place] - others) / own)


class StepCosts:
    """One engine's."""

    def __init__(self) -> None:
        self._prefill = LearntCost(4)
        self._decode = LearntCost(3)
        self._late: deque[bool] = deque(maxlen=_SAMPLED_PAUSES)
        self.longest_tokens = 0

    @property
    def is_settled(self) -> bool:
        """Whether so many steps were seen that the first ones, which compile kernels, don't count any more."""
        return self._prefill.seen >= _FEW_PREFILLS and self._decode.seen >= _FEW_DECODES

    @property
    def is_late(self) -> bool:
        """Whether most of the latest pauses were longer than the target, and enough were measured to tell."""
        return self.is_settled and len(self._late) >= _FEW_PREFILLS and 2 * sum(self._late) > len(self._late)

    def saw_prefill(self, tokens: int, pairs: float, history_tokens: int, seconds: float) -> None:
        """A step computed so many prompt tokens."""
        self._prefill.observe((1.0, tokens, pairs, history_tokens), seconds)
        self.longest_tokens = max(self.longest_tokens, tokens)

    def saw_pause(self, seconds: float, target_s: float) -> None:
        """A prefill step and the decode step after it took so long, as measured, while answers waited."""
        self._late.append(seconds > target_s)

    def forget_pauses(self) -> None:
        """The target is another one now."""
        self._late.clear()

    def saw_decode(self, sequences: int, history_tokens: int, seconds: float) -> None:
        """A step computed the next token of so many answers."""
        self._decode.observe((1.0, sequences, history_tokens), seconds)

    def prefill_s(self, tokens: int, pairs: float, history_tokens: int) -> float | None:
        """Return what a step of these prompt tokens is expected to take; None before anything was measured."""
        return self._prefill.predict((1.0, tokens, pairs, history_tokens))

    def chunk_s(self, tokens: int, history_tokens: int) -> float | None:
        """Return the same for one chunk behind so much history."""
        return self.prefill_s(tokens, tokens * (history_tokens + tokens / 2), history_tokens)

    def fixed_s(self, history_tokens: int) -> float:
        """Return the part of a chunk's time that doesn't depend on its own tokens."""
        weights = self._prefill.weights
        return weights[0] + weights[3] * history_tokens

    def decode_s(self, sequences: int, history_tokens: int) -> float | None:
        """Return what a decode step is expected to take; None before the first."""
        return self._decode.predict((1.0, sequences, history_tokens))
