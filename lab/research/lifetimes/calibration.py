"""Makes what an estimator says true on average, and says when it is sure enough to be used.

*The high quantile.* Nine of ten should stay below ``left_p90``. A factor on it is moved after each outcome, up a lot
where one was over, down a little where it wasn't, so that the share settles at nine of ten however wrong the estimator
is (Gibbs and Candes 2021).

*The confidence.* For ten ranges of the estimator's sureness it is counted how often the outcome was within a quarter of
what was said; that share, leant on the neighbours', is the confidence. So it means the same whoever made the estimate.
"""

import math
from dataclasses import dataclass
from typing import Final

from kvcontrol.kv_policy.allowed import check_share
from lab.research.lifetimes.lifetime import Estimator, LifetimeFeatures, LifetimePrediction, check_lifetime

HIGH_SHARE: Final = 0.9
NEAR: Final = 0.25
_RATE: Final = 0.02
"""How far one outcome moves the factor on the high quantile, in its logarithm."""
_MOST_SHIFT: Final = 3.0
_RANGES: Final = 10
_MEMORY: Final = 2_000.0
_LEAN: Final = 10.0


@dataclass(slots=True)
class _Range:
    seen: float = 0.0
    near: float = 0.0


class CalibratedPredictor:
    """A ``LifetimePredictor`` around an estimator; ``threshold`` is the confidence from which on it is usable."""

    def __init__(self, estimator: Estimator, *, threshold: float = 0.5) -> None:
        check_share("threshold", threshold)
        self.name = estimator.name
        self.threshold = threshold
        self._estimator = estimator
        self._shift = 0.0
        self._ranges = [_Range() for _ in range(_RANGES)]
        self._all = _Range()

    def predict_ttl(self, features: LifetimeFeatures) -> LifetimePrediction | None:
        """See ``LifetimePredictor``."""
        estimate = self._estimator.estimate(features)
        if estimate is None:
            return None
        confidence = self._confidence(estimate.sureness)
        return LifetimePrediction(
            left=estimate.left,
            left_p90=max(estimate.left, estimate.left_p90 * math.exp(self._shift)),
            confidence=confidence,
            usable=confidence >= self.threshold,
        )

    def update(self, features: LifetimeFeatures, lifetime: float) -> None:
        """See ``LifetimePredictor``; learns first how good the prediction of this one would have been."""
        check_lifetime("lifetime", lifetime)
        estimate = self._estimator.estimate(features)
        if estimate is not None:
            left = lifetime - features.age
            over = left > estimate.left_p90 * math.exp(self._shift)
            moved = self._shift + _RATE * (HIGH_SHARE if over else HIGH_SHARE - 1)
            self._shift = max(-_MOST_SHIFT, min(_MOST_SHIFT, moved))
            near = abs(left - estimate.left) <= NEAR * estimate.left
            for each in (self._all, self._ranges[_range_of(estimate.sureness)]):
                each.seen += 1
                each.near += near
                if each.seen > _MEMORY:
                    each.seen /= 2
                    each.near /= 2
        self._estimator.learn(features, lifetime)

    def _confidence(self, sureness: float) -> float:
        """Return the share that was near, of outcomes as sure as this, with neighbours where there were few."""
        if not self._all.seen:
            return 0.0
        place = _range_of(sureness)
        seen = near = 0.0
        for neighbour in (place - 1, place + 1):
            if 0 <= neighbour < _RANGES:
                seen += self._ranges[neighbour].seen
                near += self._ranges[neighbour].near
        around = (near + _LEAN * self._all.near / self._all.seen) / (seen + _LEAN)
        own = self._ranges[place]
        return (own.near + _LEAN * around) / (own.seen + _LEAN)


def _range_of(sureness: float) -> int:
    return min(_RANGES - 1, max(0, int(sureness * _RANGES)))
