"""How long something will last: until a prompt's blocks are used again, or until a request has generated its answer.

A lifetime is a positive number in whatever unit its owner counts (tokens, seconds). Predictors learn from lifetimes
that have ended, one at a time, and say before how long: the median, a value that nine of ten stay below, and how sure
they are. Each of them is an ``Estimator``; ``CalibratedPredictor`` makes what it says true on average, and is what is
used.
"""

from dataclasses import dataclass
from typing import Final, Protocol

from kvcontrol.kv_policy.allowed import MOST_TOKENS, check_number, check_whole

MOST_PAST = 8
"""Earlier lifetimes that are looked at."""
MOST_LIFETIME: Final = 1e15
"""More seconds than there were, more tokens than anybody writes: what is added up of them stays a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LifetimeFeatures:
    """What is known when a lifetime begins, and how old it is by now.

    ``past`` are the lifetimes of the same chat's earlier turns, oldest first; ``new_tokens`` by how much the prompt is
    longer than its chat's last (0 where it isn't), None where there is none. ``ValueError`` for an invalid value.
    """

    prompt_tokens: int
    new_tokens: int | None = None
    past: tuple[float, ...] = ()
    age: float = 0.0

    def __post_init__(self) -> None:
        check_whole("prompt_tokens", self.prompt_tokens, most=MOST_TOKENS)
        if self.new_tokens is not None:
            check_whole("new_tokens", self.new_tokens, most=MOST_TOKENS)
        for place, each in enumerate(self.past):
            check_lifetime(f"past[{place}]", each)
        check_number("age", self.age, most=MOST_LIFETIME)


def check_lifetime(name: str, lifetime: object) -> None:
    """Raise ``PolicyError`` for what is no lifetime."""
    check_number(name, lifetime, above=0, most=MOST_LIFETIME)


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
        """Follow a lifetime that ended; ``features`` are those it began with, of age 0. ``ValueError`` as in
        ``LifetimePredictor.update``.
        """


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
        """Follow a lifetime that ended. ``ValueError`` for one that isn't > 0 and at most ``MOST_LIFETIME``."""
