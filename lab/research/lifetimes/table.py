"""The statistical estimators: a constant, and a table of what lifetimes of the same kind were.

The table keeps a histogram for each of a few *contexts* of a lifetime, from the coarsest to the finest: all; prompts of
about this length; of nearly this length; chats whose earlier lifetimes were about so long, nearly so long, with so much
new. Each is leant on the one before it: a context that was seen n times counts n, what the coarser ones say counts
``_LEAN``. So a fine context that was never seen costs nothing, and one that was seen often decides. About 100 us an
estimate, 10 us a lesson; contexts that were used longest ago are forgotten.
"""

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Final

from kvcontrol.kv_policy.allowed import check_whole
from lab.research.lifetimes.lifetime import Estimate, LifetimeFeatures, check_lifetime
from lab.research.lifetimes.log_histogram import BUCKETS, LogHistogram, bucket_at, mass_between, middle_of, start_of

_LEAN: Final = 8.0
_MEMORY: Final = 400.0
_MEMORY_OF_ALL: Final = 3_200.0
_MOST_CONTEXTS: Final = 4_096
_LEAST: Final = 16
"""Lifetimes that must have ended before anything is said."""
_NEAR: Final = 1.25


class ConstantEstimator:
    """Says of everything what was usual of late."""

    name = "constant"

    def __init__(self) -> None:
        self._all = LogHistogram(_MEMORY_OF_ALL)

    def estimate(self, features: LifetimeFeatures) -> Estimate | None:
        """See ``Estimator``."""
        return None if self._all.total < _LEAST else estimate_of(self._all.counts, features.age)

    def learn(self, features: LifetimeFeatures, lifetime: float) -> None:  # noqa: ARG002 - all are alike to it
        """See ``Estimator``."""
        check_lifetime("lifetime", lifetime)
        self._all.add(lifetime)


class TableEstimator:
    """See the module's text."""

    name = "statistical"

    def __init__(self, *, most_contexts: int = _MOST_CONTEXTS) -> None:
        check_whole("most_contexts", most_contexts, least=1)
        self._most = most_contexts
        self._all = LogHistogram(_MEMORY_OF_ALL)
        self._contexts: OrderedDict[Hashable, LogHistogram] = OrderedDict()

    def __len__(self) -> int:
        return len(self._contexts)

    def estimate(self, features: LifetimeFeatures) -> Estimate | None:
        """See ``Estimator``."""
        if self._all.total < _LEAST:
            return None
        weights = [(count + _LEAN / BUCKETS) / (self._all.total + _LEAN) for count in self._all.counts]
        for context in _contexts(features):
            own = self._contexts.get(context)
            if own is not None:
                scale = 1 / (own.total + _LEAN)
                lean = _LEAN * scale
                weights = [count * scale + lean * weight for count, weight in zip(own.counts, weights, strict=True)]
        return estimate_of(weights, features.age)

    def learn(self, features: LifetimeFeatures, lifetime: float) -> None:
        """See ``Estimator``."""
        check_lifetime("lifetime", lifetime)
        self._all.add(lifetime)
        contexts = self._contexts
        for context in _contexts(features):
            own = contexts.get(context)
            if own is None:
                own = contexts[context] = LogHistogram(_MEMORY)
                if len(contexts) > self._most:
                    contexts.popitem(last=False)
            else:
                contexts.move_to_end(context)
            own.add(lifetime)


def estimate_of(weights: list[float], age: float) -> Estimate:
    """Return what a distribution over lifetimes says of one that is so old."""
    middle = bucket_at(weights, 0.5, above=age)
    high = bucket_at(weights, 0.9, above=age)
    if middle is None or high is None:
        return Estimate(left=0.0, left_p90=0.0, sureness=0.0)
    left = max(0.0, middle_of(middle) - age)
    left_p90 = start_of(high + 1) - age
    over = 1 - mass_between(weights, 0, age) / math.fsum(weights) if age else 1.0
    near = mass_between(weights, age + left / _NEAR, age + left * _NEAR) / math.fsum(weights)
    return Estimate(left=left, left_p90=left_p90, sureness=min(1.0, near / over) if over > 0 else 0.0)


def _contexts(features: LifetimeFeatures) -> Iterator[Hashable]:
    """Yield names of contexts, the coarsest first."""
    past = features.past
    later = bool(past)
    yield "prompt", later, _step(features.prompt_tokens, 2)
    if not past:
        yield "alone", _step(features.prompt_tokens, 5)
        return
    mean = math.fsum(past) / len(past)
    yield "past", _step(mean, 2)
    yield "past", min(len(past), 3), _step(mean, 4)
    if features.new_tokens is not None:
        yield "again", _step(mean, 6), features.new_tokens == 0
        yield "new", _step(mean, 3), _step(max(1, features.new_tokens - past[-1]), 1)


def _step(value: float, fineness: int) -> int:
    return int(math.log2(max(1.0, value)) * fineness)
