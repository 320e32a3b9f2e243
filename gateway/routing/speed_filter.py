"""Estimates speeds from answers: a Kalman filter over the coefficients of the TTFT.

    time to first token = base + tokens to compute before it x seconds a token + requests running x delay of each

The state does a random walk: what is assumed at first gives way to what is seen, and slow changes are followed. One
long or odd answer moves it little: an error counts for at most three of its standard deviations. Rejected: an average
of tokens per second, which books queueing as slowness.

Prompts that are all alike say what the sum is and nothing about its parts: two filters may agree in every prediction
and still hold quite different coefficients.
"""

from gateway.routing.base import CostModel, Speeds

_FEATURES = 3
_DRIFT = 0.02
_NOISE_SHARE = 0.2
_NOISE_S = 0.004
_CLIP = 3.0
_SLOWEST_S_PER_TOKEN = 1.0
_FASTEST_S_PER_TOKEN = 1e-7
_KILO = 1000.0
_FLOORS = (0.001, 0.001, 0.0005)


class SpeedFilter:
    """State ``x`` (base_s, seconds per 1,000 tokens, seconds per running request) and its covariance ``p``."""

    __slots__ = ("_p", "_x")

    def __init__(self, costs: CostModel) -> None:
        self._x = [0.0, _KILO / costs.prefill_tokens_per_s, costs.decode_load_s]
        spread = [0.05, self._x[1], max(self._x[2], 0.005)]
        self._p = [[spread[i] ** 2 if i == j else 0.0 for j in range(_FEATURES)] for i in range(_FEATURES)]

    def expected_s(self, tokens: float, running: float) -> float:
        """Return how long such an answer is going to take to begin."""
        x = self._x
        return x[0] + tokens / _KILO * x[1] + running * x[2]

    def observe(self, tokens: float, running: float, took_s: float) -> None:
        """Take in an answer."""
        features = (1.0, tokens / _KILO, running)
        x, p = self._x, self._p
        for i, floor in enumerate(_FLOORS):
            p[i][i] += (_DRIFT * max(x[i], floor)) ** 2
        gain = [sum(p[i][j] * features[j] for j in range(_FEATURES)) for i in range(_FEATURES)]
        noise = (_NOISE_SHARE * took_s + _NOISE_S) ** 2
        variance = sum(features[i] * gain[i] for i in range(_FEATURES)) + noise
        bound = _CLIP * variance**0.5
        error = max(-bound, min(bound, took_s - sum(features[i] * x[i] for i in range(_FEATURES))))
        for i in range(_FEATURES):
            x[i] += gain[i] / variance * error
        for i in range(_FEATURES):
            for j in range(_FEATURES):
                p[i][j] -= gain[i] * gain[j] / variance
        x[0] = max(0.0, x[0])
        x[1] = max(_FASTEST_S_PER_TOKEN * _KILO, min(_SLOWEST_S_PER_TOKEN * _KILO, x[1]))
        x[2] = max(0.0, x[2])

    def speeds(self, *, answer_s: float) -> Speeds:
        """Return what is known now."""
        base_s, s_per_kilo, decode_s = self._x
        return Speeds(prefill_tokens_per_s=_KILO / s_per_kilo, decode_load_s=decode_s, base_s=base_s, answer_s=answer_s)
