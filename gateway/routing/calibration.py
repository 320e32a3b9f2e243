"""How fast each instance really is, learned from how long its answers took to begin.

    time to first token = base + tokens to compute before it x seconds a token + requests running x delay of each

The three coefficients are the state of a Kalman filter with a random walk: what is assumed at first gives way to what
is seen, and slow changes are followed. One long or odd answer moves them little: an error counts for at most three of
its standard deviations. Rejected: an average of tokens per second, which books queueing as slowness.

What was seen of an instance grows old while only others answer: then it is taken to be more and more like the one that
answered last, as one that nothing is known of is from the start. Otherwise an instance that once looked slow would get
nothing any more, and so could never show that it isn't.
"""

from gateway.routing.base import CostModel, Speeds
from kvcontrol.core.ids import InstanceId

_FEATURES = 3
_DRIFT = 0.02
_NOISE_SHARE = 0.2
_NOISE_S = 0.004
_CLIP = 3.0
_SLOWEST_S_PER_TOKEN = 1.0
_FASTEST_S_PER_TOKEN = 1e-7
_KILO = 1000.0
_ANSWER_SHARE = 0.1
_HALVED_AFTER = 4.0
"""Answers of each other instance that halve what an instance's own past counts for."""
_PATIENCE = 4


class _Filter:
    """State ``x`` (base_s, seconds per 1,000 tokens, seconds per running request) and its covariance ``p``."""

    __slots__ = ("answer_s", "known", "p", "seen", "x")

    def __init__(self, costs: CostModel) -> None:
        self.x = [0.0, _KILO / costs.prefill_tokens_per_s, costs.decode_load_s]
        spread = [0.05, self.x[1], max(self.x[2], 0.005)]
        self.p = [[spread[i] ** 2 if i == j else 0.0 for j in range(_FEATURES)] for i in range(_FEATURES)]
        self.known: Speeds | None = None
        self.seen = 0
        self.answer_s = 0.0

    def observe(self, tokens: float, running: float, took_s: float) -> None:
        features = (1.0, tokens / _KILO, running)
        x, p = self.x, self.p
        for i, floor in enumerate((0.001, 0.001, 0.0005)):
            p[i][i] += (_DRIFT * max(x[i], floor)) ** 2
        gain = [sum(p[i][j] * features[j] for j in range(_FEATURES)) for i in range(_FEATURES)]
        noise = (_NOISE_SHARE * took_s + _NOISE_S) ** 2
        variance = sum(features[i] * gain[i] for i in range(_FEATURES)) + noise
        error = took_s - sum(features[i] * x[i] for i in range(_FEATURES))
        bound = _CLIP * variance**0.5
        error = max(-bound, min(bound, error))
        for i in range(_FEATURES):
            x[i] += gain[i] / variance * error
        for i in range(_FEATURES):
            for j in range(_FEATURES):
                p[i][j] -= gain[i] * gain[j] / variance
        x[0] = max(0.0, x[0])
        x[1] = max(_FASTEST_S_PER_TOKEN * _KILO, min(_SLOWEST_S_PER_TOKEN * _KILO, x[1]))
        x[2] = max(0.0, x[2])
        self.known = Speeds(prefill_tokens_per_s=_KILO / x[1], decode_load_s=x[2], base_s=x[0], answer_s=self.answer_s)


class Calibration:
    """One filter for each instance; observing is O(1), about ten microseconds."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._filters: dict[InstanceId, _Filter] = {}
        self._observed = 0
        self._latest: Speeds | None = None

    @property
    def observed(self) -> int:
        """How many answers have been observed."""
        return self._observed

    @property
    def patience(self) -> int:
        """How many more answers change an instance's speeds by no more than a few percent, if none is its own: for who
        keeps them.
        """
        return max(1, len(self._filters) // _PATIENCE)

    def observe(self, instance: InstanceId, *, tokens: int, running: int, took_s: float) -> None:
        """Note an answer: ``tokens`` had to be computed before its first one (its own and those queued before it),
        ``running`` other requests ran there, and it took ``took_s``.
        """
        if took_s > 0:
            each = self._filter(instance)
            each.observe(tokens, running, took_s)
            self._observed += 1
            each.seen = self._observed
            self._latest = each.known

    def ended(self, instance: InstanceId, took_s: float) -> None:
        """Note how long a request ran in all."""
        each = self._filter(instance)
        each.answer_s += (took_s - each.answer_s) * (_ANSWER_SHARE if each.answer_s else 1.0)

    def speeds(self, instance: InstanceId) -> Speeds | None:
        """Return what is known, None before anybody's first answer."""
        latest = self._latest
        each = self._filters.get(instance)
        known = None if each is None else each.known
        if each is None or known is None or latest is None:
            return latest
        old = self._observed - each.seen
        if not old:
            return known
        others = max(1, len(self._filters) - 1)
        return _between(latest, known, 0.5 ** (old / (_HALVED_AFTER * others)))

    def forget(self, instance: InstanceId) -> None:
        self._filters.pop(instance, None)
        if not self._filters:
            self._latest = None

    def _filter(self, instance: InstanceId) -> _Filter:
        each = self._filters.get(instance)
        if each is None:
            each = self._filters[instance] = _Filter(self._costs)
        return each


def _between(one: Speeds, other: Speeds, share: float) -> Speeds:
    """What lies between two, ``share`` of the way from one to the other; times, not speeds, are what is linear."""
    one_s, other_s = 1 / one.prefill_tokens_per_s, 1 / other.prefill_tokens_per_s
    return Speeds(
        prefill_tokens_per_s=1 / (one_s + (other_s - one_s) * share),
        decode_load_s=one.decode_load_s + (other.decode_load_s - one.decode_load_s) * share,
        base_s=one.base_s + (other.base_s - one.base_s) * share,
        answer_s=other.answer_s,
    )


__all__ = ["Calibration"]
