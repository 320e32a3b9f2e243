"""How one simulated engine differs from its profile."""

import math
import random
from dataclasses import dataclass
from typing import Final

LEAST_FACTOR: Final = 1e-6
MOST_FACTOR: Final = 1e6
"""Of what an engine is made slower by, or lies by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """``jitter`` is the spread (sigma of a log-normal) of steps' times, by ``seed``; ``slow`` multiplies all times;
    ``corrupt_share`` of the blocks that are loaded come wrong.
    """

    seed: int = 0
    jitter: float = 0.0
    slow: float = 1.0
    corrupt_share: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter is {self.jitter}; allowed is 0 to 1")
        if not LEAST_FACTOR <= self.slow <= MOST_FACTOR:
            raise ValueError(f"slow is {self.slow}; allowed is {LEAST_FACTOR:g} to {MOST_FACTOR:,.0f}")
        if not 0 <= self.corrupt_share <= 1:
            raise ValueError(f"corrupt_share is {self.corrupt_share}; allowed is 0 to 1")


class Pace:
    """How much slower than the profile each step is, drawn anew at each call."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        self._rng = random.Random(behaviour.seed)  # noqa: S311 - to be repeatable is what it is for

    def __call__(self) -> float:
        behaviour = self._behaviour
        if not behaviour.jitter:
            return behaviour.slow
        return behaviour.slow * math.exp(self._rng.gauss(0.0, behaviour.jitter))
