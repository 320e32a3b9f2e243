"""How long something will last: until a prompt's blocks are used again, or until a request has generated its answer.

A lifetime is a positive number in whatever unit its owner counts (tokens, seconds). Predictors learn from lifetimes
that have ended, one at a time, and say before how long: the median, a value that nine of ten stay below, and how sure
they are. Each of them is an ``Estimator``; ``CalibratedPredictor`` makes what it says true on average, and is what is
used.
"""

import math
from dataclasses import dataclass
from typing import Protocol

MOST_PAST = 8
"""Earlier lifetimes that are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LifetimeFeatures:
    """What is known when a lifetime begins, and how old it is by now.

    ``past`` are the lifetimes of the same chat's earlier turns, oldest first; ``new_tokens`` by how much the prompt is
    longer than its chat's last, None where there is none.
    """

    prompt_tokens: int
    new_tokens: int | None = None
    past: tuple[float, ...] = ()
    age: float = 0.0

    def __post_init__(self) -> None:
        if self.prompt_tokens < 0 or not (self.age >= 0 and math.isfinite(self.age)):
            raise ValueError(f"{self.prompt_tokens} prompt tokens at age {self.age}; both must be >= 0, and finite")
        for each in self.past:
            if not (each > 0 and math.isfinite(each)):
                raise ValueError(f"a past lifetime of {each}; it must be > 0 and finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """``left`` is the median of what is still to come, ``left_p90`` what nine of ten stay below.

    ``sureness`` is between 0 and 1 and grows with the chance that ``left`` is about right, on no particular scale.
    """

    left: float
    left_p90: float
    sureness: float


class Estimator(Protocol):
    """Learns from lifetimes that have ended. Not thread-safe."""

    name: str

    def estimate(self, features: LifetimeFeatures) -> Estimate | None:
        """Return what is to be expected; None before enough was learnt. Changes nothing."""

    def learn(self, features: LifetimeFeatures, lifetime: float) -> None:
        """Follow a lifetime that ended; ``features`` are those it began with, of age 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LifetimePrediction:
    """``confidence`` is the probability that what comes is within a quarter of ``left``, as seen so far.

    ``usable`` says whether that is enough to act on; whoever acts leaves alone what isn't.
    """

    left: float
    left_p90: float
    confidence: float
    usable: bool


class LifetimePredictor(Protocol):
    """What policies and schedulers ask. Not thread-safe."""

    name: str

    def predict_ttl(self, features: LifetimeFeatures) -> LifetimePrediction | None:
        """Return how long it will still last; None before enough was learnt."""

    def update(self, features: LifetimeFeatures, lifetime: float) -> None:
        """Follow a lifetime that ended. ``ValueError`` for one that isn't > 0 and finite."""


__all__ = ["MOST_PAST", "Estimate", "Estimator", "LifetimeFeatures", "LifetimePrediction", "LifetimePredictor"]
