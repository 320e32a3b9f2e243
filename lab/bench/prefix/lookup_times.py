"""How long a structure takes to say how much of a prompt it holds: all of it, its first half, or nothing.

A *hit* is a prompt that is held whole, a *partial* one continues anew after its first half, a *miss* was never seen.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvcontrol.core import BlockHash
from lab.bench.timing import each_s, quantile

BLOCK_TOKENS = 64
LENGTHS = (188, 2_048)
"""Blocks of the held prompts: 12 K and 128 K tokens."""
SYSTEM_BLOCKS = 16
"""All prompts begin with the same so many."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Median and 99th percentile of single calls, in microseconds."""

    p50_us: float
    p99_us: float

    @classmethod
    def of(cls, took_s: Sequence[float]) -> "Quantiles":
        """Return those of sorted durations in seconds."""
        return cls(p50_us=quantile(took_s, 0.5) * 1e6, p99_us=quantile(took_s, 0.99) * 1e6)

    @classmethod
    def timed(cls, calls: Sequence[T], work: Callable[[T], object], *, warm_up: int = 50) -> "Quantiles":
        """Return those of ``work`` on each of ``calls``."""
        return cls.of(each_s(calls, work, warm_up=warm_up))


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupTimes:
    """One structure's times for prompts of one length, while ``held_blocks`` are held by so many instances.

    ``given`` says what the call starts from: keys of blocks, tokens, or a hit. A prompt of one block has no half:
    ``partial`` is None.
    """

    structure: str
    given: str
    held_blocks: int
    instances: int
    prompt_blocks: int
    hit: Quantiles
    partial: Quantiles | None
    miss: Quantiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A benchmark's figures: single ones by a name that ends in their unit, and look-up times."""

    metrics: dict[str, float]
    lookups: tuple[LookupTimes, ...]


def random_keys(blocks: int, rng: random.Random) -> list[BlockHash]:
    """Return keys that nobody holds."""
    return [BlockHash(rng.randbytes(16)) for _ in range(blocks)]


def continued(prompt: Sequence[BlockHash], rng: random.Random) -> list[BlockHash]:
    """Return a prompt's first half, continued with unknown blocks to the same length."""
    half = len(prompt) // 2
    return [*prompt[:half], *random_keys(len(prompt) - half, rng)]
