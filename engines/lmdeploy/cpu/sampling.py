"""Sampling that depends on a request's own seed and position, and on nothing else in the batch.

LMDeploy's default sampler draws from torch's global generator and ignores seeds. Here each row's uniform number is a
hash of (seed, position), and the token is the one where the cumulative probability passes it. So the same seed and
prompt give the same tokens, whatever runs beside them and in whichever order.
"""

from typing import Any

import torch
from lmdeploy.pytorch.backends.multinomial_sampling import MultinomialSamplingImpl

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that is fixed by ``seed`` and ``position``.

    SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014): the seed is mixed once so
    that neighbouring seeds start far apart, then the position selects the output of that stream.
    """
    return (_mix((_mix((seed * _GOLDEN) & _MASK) + (position + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def _mix(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


class SeededMultinomialSampling(MultinomialSamplingImpl):
    """Inverse-CDF sampling with one hashed uniform number per row."""

    def forward(self, scores: Any, seeds: Any, offsets: Any, indices: Any = None) -> Any:
        """Return one token per row of ``scores`` (probabilities); ``indices`` maps columns to tokens."""
        draws = [uniform(seed, offset) for seed, offset in zip(seeds.tolist(), offsets.tolist(), strict=True)]
        cumulative = scores.double().cumsum(1)
        # The threshold stays below the sum, so a column of probability zero is never chosen.
        threshold = torch.tensor(draws, dtype=torch.float64)[:, None] * cumulative[:, -1:]
        chosen = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=scores.size(1) - 1)
        return (chosen if indices is None else indices.gather(1, chosen)).view(-1)
