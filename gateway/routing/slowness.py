"""How much slower, or faster, one instance is than the others: equal, until its answers have shown otherwise.

What an answer took, against what was expected, is a ratio; its logarithm is how far it was *off*. An instance's answers
are compared with those that the others gave meanwhile, in rounds: a round ends with an answer of its own once another
instance has answered, too. So a load that slows the whole machine for a while says nothing about any one of them, and
twenty answers in a row that came in a bad moment say as much as one.

    lead    a running average of what rounds said: how far off it was, beyond the others
    trust   0 while the lead is within what chance alone makes of equal instances (two and a half standard deviations of
            such an average, and at least 20 percent); 1 from half as much again on
    level   a running average of how far off its answers are: where it stands against what was expected

Slowness is then e^(trust x level). An instance three times as slow is known for it after some ten answers; one that is
ten percent slower never is, and need not be.
"""

from math import exp, log

_GRAIN_S = 0.005
"""Times are compared as if each were so much longer: a millisecond or three make no instance slow."""
_GAIN = 0.2
_MOST_OFF = 1.2
_DEVIATIONS = 2.5
_LEAST_LEAD = 0.2
_BETWEEN = 0.5
"""From so much beyond chance on, as a share of it, a lead is fully trusted."""
_NOISE_GAIN = 0.05
_NOISE_AT_FIRST = 0.5


def off(took_s: float, expected_s: float) -> float:
    """Return how far off an answer was: 0 as expected, 0.69 twice as long."""
    return log((took_s + _GRAIN_S) / (expected_s + _GRAIN_S))


class Field:
    """What all instances' answers said together: how far off they were, and the ``variance`` of what rounds say."""

    __slots__ = ("count", "total", "variance")

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0
        self.variance = _NOISE_AT_FIRST**2

    def note(self, error: float) -> None:
        """Note how far off anybody's answer was."""
        self.total += error
        self.count += 1

    def surprise(self, by: float) -> None:
        """Note that a round said something else, by so much, than those before it."""
        self.variance += (by * by - self.variance) * _NOISE_GAIN


class Slowness:
    """One instance's; ``spread`` is the variance of its lead, as a share of that of what rounds say."""

    __slots__ = ("_count", "_field", "_lead", "_level", "_rounds", "_since", "_spread", "_total", "_trust")

    def __init__(self, field: Field) -> None:
        self._field = field
        self._lead = 0.0
        self._level = 0.0
        self._trust = 0.0
        self._rounds = 0
        self._spread = 0.0
        self._begin()

    def note(self, error: float) -> bool:
        """Note the error of one of the instance's answers, here and in the field. Return whether that ended a round."""
        field = self._field
        field.note(error)
        self._total += error
        self._count += 1
        self._level += _bounded(error - self._level) * _GAIN
        total, count = self._since
        others = field.count - count - self._count
        if others:
            self._update(self._total / self._count - (field.total - total - self._total) / others)
        return bool(others)

    def _update(self, measured: float) -> None:
        """End a round that said this."""
        field = self._field
        self._begin()
        self._rounds += 1
        gain = max(_GAIN, 1 / (self._rounds + 1))
        surprise = _bounded(measured) - self._lead
        field.surprise(surprise)
        self._lead += surprise * gain
        self._spread = (1 - gain) ** 2 * self._spread + gain**2
        chance = max(_LEAST_LEAD, _DEVIATIONS * (field.variance * self._spread) ** 0.5)
        self._trust = max(0.0, min(1.0, (abs(self._lead) / chance - 1) / _BETWEEN))

    @property
    def shown(self) -> bool:
        """Whether it is anything but equal."""
        return self._trust > 0

    def factor(self, *, fresh: float = 1.0) -> float:
        """Return what to multiply expected times by; ``fresh`` is the share that what it showed still counts for."""
        return exp(self._trust * self._level * fresh) if self._trust else 1.0

    def _begin(self) -> None:
        self._since = (self._field.total, self._field.count)
        self._total = 0.0
        self._count = 0


def _bounded(error: float) -> float:
    return max(-_MOST_OFF, min(_MOST_OFF, error))
