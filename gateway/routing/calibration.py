"""How fast each instance really is, learned from how long its answers took to begin.

All instances share one filter (``speed_filter``), fed by every answer: it knows the parts of a time to the first token.
Beside it each has one number of its own (``slowness``): how many times as long it takes, 1 until it has earned another.
So equal instances have equal speeds, whatever noise and hiccups there are, and share a burst evenly. Rejected: a filter
for each instance. Prompts that are alike don't tell the parts of a time from each other, so two equal instances soon
held unlike coefficients, and a burst of other prompts went to one of them alone.

What was seen of an instance grows old while it cannot be compared, because only others answer, or only it: then it is
taken to be more and more like the fleet. Otherwise an instance that once looked slow would get nothing any more, and so
could never show that it isn't; and one that once looked quick would get everything, and nothing would contradict it.
"""

from collections.abc import Set as AbstractSet

from gateway.routing.base import CostModel, Speeds
from gateway.routing.slowness import Field, Slowness, off
from gateway.routing.speed_filter import SpeedFilter
from kvcontrol.core.ids import InstanceId

_ANSWER_SHARE = 0.1
_HALVED_AFTER = 4.0
"""Answers for each other instance, since an instance was compared, that halve what its own past counts for."""
_PATIENCE = 4
"""A fleet of so many times n is told its speeds anew every n answers: they change them by a few percent at most."""


class _Own:
    """What an instance's answers have said of it alone; ``compared`` numbers the last one that ended a round."""

    __slots__ = ("compared", "slowness")

    def __init__(self, field: Field) -> None:
        self.slowness = Slowness(field)
        self.compared = 0


class Calibration:
    """One filter for the fleet, one slowness for each instance; observing is O(1), about ten microseconds."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._owns: dict[InstanceId, _Own] = {}
        self._unlike: set[InstanceId] = set()
        self._begin()

    def _begin(self) -> None:
        self._filter = SpeedFilter(self._costs)
        self._field = Field()
        self._observed = 0
        self._answer_s = 0.0
        self._fleet: Speeds | None = None
        self._version = 0

    @property
    def version(self) -> int:
        """What changes when speeds do of instances that gave no answer: with every answer in a small fleet, with every
        few in a large one, and then for all of it at once. So those who keep what they were told keep equals equal.
        """
        return self._version

    def observe(self, instance: InstanceId, *, tokens: int, running: int, took_s: float) -> None:
        """Note an answer: ``tokens`` had to be computed before its first one (its own and those queued before it),
        ``running`` other requests ran there, and it took ``took_s``.
        """
        if took_s <= 0:
            return
        own = self._owns.get(instance)
        if own is None:
            own = self._owns[instance] = _Own(self._field)
        if self._observed:  # what is assumed at first is nothing to be measured by
            ended_round = own.slowness.note(off(took_s, self._filter.expected_s(tokens, running)))
            if ended_round:
                own.compared = self._observed + 1
            (self._unlike.add if own.slowness.shown else self._unlike.discard)(instance)
        self._filter.observe(tokens, running, took_s)
        self._observed += 1
        if self._fleet is None or self._observed - self._version >= max(1, len(self._owns) // _PATIENCE):
            self._fleet = self._filter.speeds(answer_s=self._answer_s)
            self._version = self._observed

    def ended(self, took_s: float) -> None:
        """Note how long a request ran in all."""
        self._answer_s += (took_s - self._answer_s) * (_ANSWER_SHARE if self._answer_s else 1.0)

    @property
    def fleet(self) -> Speeds | None:
        """The speeds of all instances that are like the others; None before anybody's first answer."""
        return self._fleet

    @property
    def unlike(self) -> AbstractSet[InstanceId]:
        """The instances whose answers have shown that they are not."""
        return self._unlike

    def speeds(self, instance: InstanceId) -> Speeds | None:
        """Return what is known, None before anybody's first answer."""
        own, fleet = self._owns.get(instance), self._fleet
        if own is None or fleet is None or not own.slowness.shown:
            return fleet
        others = max(1, len(self._owns) - 1)
        factor = own.slowness.factor(fresh=0.5 ** ((self._observed - own.compared) / (_HALVED_AFTER * others)))
        return fleet if factor == 1 else _slower(fleet, factor)

    def forget(self, instance: InstanceId) -> None:
        self._owns.pop(instance, None)
        self._unlike.discard(instance)
        if not self._owns:
            self._begin()


def _slower(speeds: Speeds, factor: float) -> Speeds:
    return Speeds(
        prefill_tokens_per_s=speeds.prefill_tokens_per_s / factor,
        decode_load_s=speeds.decode_load_s * factor,
        base_s=speeds.base_s * factor,
        answer_s=speeds.answer_s * factor,
    )
