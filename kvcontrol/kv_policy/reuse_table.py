"""How likely is something of a class used again, given how long it has not been: hazards, learnt from gaps.

Ages and gaps count in ticks and fall into buckets, four to a doubling. A gap begins with a use (``begun``) and ends by
the next (``used``) or when nobody watches any longer (``ended``). For each class and bucket, those that were used in it
over all that got so far is the bucket's hazard (Kaplan and Meier 1958); what is still open counts as having got as far
as it has, which is known by slots of begin times. A class that was seen little leans on all classes together.

``worth`` is what a cache wants to know, Gittins' index (1979): of something that has reached an age, the uses to be
expected per tick of waiting, with the best time to give up. Worked out when it is asked for and kept, and anew with the
hazards, one class every few hundred observations. Counts are halved once they have grown to a bound, so that
what is long past fades. O(1) amortised an observation; an answer that isn't at hand takes at most ``BUCKETS`` steps.
"""

from typing import Final

_STEPS: Final = 4
"""Buckets to a doubling."""
BUCKETS: Final = 40 * _STEPS
_PRIOR: Final = 32.0
"""Gaps of all classes together that count as much as a class's own."""
_FLOOR: Final = 1e-12
_LITTLE: Final = 0.02
"""Share that is left of what was waited for, which isn't worth looking ahead for."""
_LEAST_WINDOW: Final = 1024
_SLOTS: Final = 256
"""Slots of begin times to a window."""


def bucket_of(age: int) -> int:
    """Return the bucket of an age; O(1)."""
    bits = age.bit_length()
    if bits <= 2:  # noqa: PLR2004 - with two bits a bucket holds one age
        return max(0, age)
    return min(BUCKETS - 1, _STEPS * (bits - 2) + ((age >> (bits - 3)) & (_STEPS - 1)))


def start_of(bucket: int) -> int:
    """Return the least age of a bucket."""
    if bucket < _STEPS:
        return bucket
    octave, step = divmod(bucket, _STEPS)
    return (_STEPS + step) << (octave - 1)


_WIDTHS: Final = tuple(start_of(bucket + 1) - start_of(bucket) for bucket in range(BUCKETS))


class ReuseTable:
    """See the module's text. ``patience`` ticks are waited at most; counts are halved at ``window`` observations.

    A class is worked out anew every ``work_every`` observations; by default seldom, for millions of observations.
    """

    def __init__(self, classes: int, *, patience: int, window: int, work_every: int | None = None) -> None:
        self.classes = classes
        self._patience = max(1, patience)
        self._window = max(_LEAST_WINDOW, window)
        self._work_every = max(_LEAST_WINDOW // 8, self._window // 512) if work_every is None else work_every
        self._slot_ticks = max(1, window // _SLOTS)
        self._used = [[0.0] * BUCKETS for _ in range(classes + 1)]
        """By class and bucket; the last class is all of them together."""
        self._ended = [[0.0] * BUCKETS for _ in range(classes + 1)]
        self._open: list[dict[int, int]] = [{} for _ in range(classes + 1)]
        """Gaps that are open, by the slot in which they began."""
        self.version = 0
        """Counts up when a class is worked out anew."""
        self.versions = [0] * classes
        """Of each class."""
        self._observed = 0
        self._next = 0
        self._until_work = 0
        self._hazards: list[list[float] | None] = [None] * classes
        """None before anything is known: what was used last is worth most."""
        self._worths: list[dict[int, float]] = [{} for _ in range(classes)]
        self._queried: list[set[int]] = [set() for _ in range(classes)]
        """Buckets asked for since the class was last worked out: they and the next will be, and are kept at hand."""

    def begun(self, klass: int, now: int) -> None:
        """Follow a use, after which a gap begins."""
        slot = now // self._slot_ticks
        for began in (self._open[klass], self._open[-1]):
            began[slot] = began.get(slot, 0) + 1

    def used(self, klass: int, began: int, now: int) -> None:
        """Follow the use that ends a gap."""
        self._close(klass, began)
        bucket = bucket_of(now - began)
        self._used[klass][bucket] += 1
        self._used[-1][bucket] += 1
        self._count(now)

    def ended(self, klass: int, began: int, now: int) -> None:
        """Follow a gap that isn't watched any more."""
        self._close(klass, began)
        bucket = bucket_of(now - began)
        self._ended[klass][bucket] += 1
        self._ended[-1][bucket] += 1
        self._count(now)

    def worth(self, klass: int, bucket: int) -> float:
        """Return the uses per tick to be expected of something in a bucket; good for one of its class' ``versions``."""
        hazards = self._hazards[klass]
        if hazards is None:
            return 1.0 / (1 + start_of(bucket))
        worths = self._worths[klass]
        self._queried[klass].add(bucket)
        worth = worths.get(bucket)
        if worth is None:
            worth = worths[bucket] = index_of(hazards, bucket, self._patience)
        return worth

    def probability(self, klass: int, age: int, ahead: int) -> float:
        """Return the probability of a use within the next ``ahead`` ticks, 0 before anything is known. O(buckets)."""
        hazards = self._hazards[klass]
        if hazards is None or ahead <= 0:
            return 0.0
        left, at = 1.0, max(0, age)
        end = at + ahead
        for bucket in range(bucket_of(at), BUCKETS):
            upto = min(end, start_of(bucket + 1))
            left *= (1 - min(hazards[bucket], 1.0)) ** (max(0, upto - at) / _WIDTHS[bucket])
            at = max(at, upto)
            if at >= end:
                break
        return 1 - left

    def hazards(self, klass: int, now: int) -> list[float]:
        """Return the share of what reached each bucket that was used in it, leaning on all classes. O(buckets)."""
        return self._hazards_of(klass, now, self._hazards_of(-1, now, None))

    def _close(self, klass: int, began: int) -> None:
        slot = began // self._slot_ticks
        for slots in (self._open[klass], self._open[-1]):
            left = slots[slot] - 1
            if left:
                slots[slot] = left
            else:
                del slots[slot]

    def _count(self, now: int) -> None:
        self._observed += 1
        if self._observed >= self._window:
            self._observed //= 2
            for counts in (*self._used, *self._ended):
                for bucket, count in enumerate(counts):
                    if count:
                        counts[bucket] = count / 2
        self._until_work -= 1
        if self._until_work < 0:
            self._until_work = self._work_every
            self._next = (self._next + 1) % self.classes
            self._work_out(self._next, now)

    def _work_out(self, klass: int, now: int) -> None:
        hazards = self._hazards[klass] = self.hazards(klass, now)
        wanted = self._queried[klass]
        wanted.update([bucket + 1 for bucket in wanted if bucket + 1 < BUCKETS])  # for what grows older
        self._worths[klass] = {bucket: index_of(hazards, bucket, self._patience) for bucket in wanted}
        self._queried[klass] = set()
        self.version += 1
        self.versions[klass] += 1

    def _hazards_of(self, klass: int, now: int, overall: list[float] | None) -> list[float]:
        used, ended = self._used[klass], self._ended[klass]
        still_open = [0] * BUCKETS
        for slot, count in self._open[klass].items():
            still_open[bucket_of(now - slot * self._slot_ticks)] += count
        at_risk = 0.0
        found = [0.0] * BUCKETS
        for bucket in range(BUCKETS - 1, -1, -1):
            at_risk += used[bucket] + ended[bucket] + still_open[bucket]
            if overall is not None:
                found[bucket] = (used[bucket] + _PRIOR * overall[bucket]) / (at_risk + _PRIOR)
            elif at_risk:
                found[bucket] = used[bucket] / at_risk
        return found


def index_of(hazards: list[float], first: int, patience: int) -> float:
    """Return the uses per tick of waiting from bucket ``first`` on, with the best end to it within ``patience``."""
    left, used, waited, best = 1.0, 0.0, 0.0, _FLOOR
    for bucket in range(first, BUCKETS):
        now_used = left * hazards[bucket]
        waited += (left - now_used / 2) * _WIDTHS[bucket]
        used += now_used
        left -= now_used
        if used > best * waited:
            best = used / waited
        if waited >= patience or left < _LITTLE:
            break
    return best
