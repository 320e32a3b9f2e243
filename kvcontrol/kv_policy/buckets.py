"""Things in numbered buckets, of which the lowest that isn't empty is always at hand.

A bucket is there only while something is in it. A heap has the number of every bucket that is there; numbers of buckets
that have gone stay in it until they come to its top, or until they are the greater part of it. So an emptied bucket
costs whoever asks next one step, which its filling has paid for, and memory follows what is there, not what was.
"""

from collections import OrderedDict
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from kvcontrol.kv_policy.base import OLDEST

Key = TypeVar("Key")
Value = TypeVar("Value")

_SLACK = 64


class Buckets(Generic[Key, Value]):
    """Each bucket keeps its things in the order in which they were put in. O(log of the buckets), amortised."""

    def __init__(self) -> None:
        self._buckets: dict[int, OrderedDict[Key, Value]] = {}
        self._numbers: list[int] = []

    def put(self, number: int, key: Key, value: Value) -> None:
        """Put something at the end of a bucket."""
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = OrderedDict()
            heappush(self._numbers, number)
            if len(self._numbers) > 2 * len(self._buckets) + _SLACK:
                self._numbers = list(self._buckets)
                heapify(self._numbers)
        bucket[key] = value

    def take(self, number: int, key: Key) -> Value:
        """Take something out of its bucket; ``KeyError`` when it isn't there."""
        bucket = self._buckets[number]
        value = bucket.pop(key)
        if not bucket:
            del self._buckets[number]
        return value

    def lowest(self) -> tuple[int, OrderedDict[Key, Value]] | None:
        """Return the lowest bucket that has anything in it, to look at; None when there is none."""
        numbers, buckets = self._numbers, self._buckets
        while numbers:
            bucket = buckets.get(numbers[0])
            if bucket is not None:
                return numbers[0], bucket
            heappop(numbers)
        return None

    def take_lowest(self, most: int) -> tuple[int, list[tuple[Key, Value]]] | None:
        """Take up to so many out of the lowest bucket, in their order, at least one; None when there is none."""
        numbers, buckets = self._numbers, self._buckets
        while numbers:
            number = numbers[0]
            bucket = buckets.get(number)
            if bucket is None:
                heappop(numbers)
                continue
            pop = bucket.popitem
            taken = [pop(OLDEST)]
            while len(taken) < most and bucket:
                taken.append(pop(OLDEST))
            if not bucket:
                del buckets[number]
            return number, taken
        return None
