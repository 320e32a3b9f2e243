"""A line of thousands of which only the front is looked at: sorted there, and roughly ordered behind it.

Whoever takes a few of ten thousand needs those in order, not the others. So what is far away is put into buckets by
rank, where coming, leaving and being moved touch one dictionary; a bucket is sorted when the front comes to it. In a
sorted line of all of them each that comes costs fourteen comparisons, all of them with what nobody has touched for
long.

    near  a ``Line`` of those of all buckets that have been opened
    far   the others: buckets of a quarter of a unit of rank each (a unit is a second)

The idea is the ladder queue's (Tang, Goh and Thng, ACM TOMACS 15(3), 2005), with a single rung.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain
from math import inf
from typing import Final

from kvcontrol.scheduler_ir.strategies.base import WaitingRequest
from kvcontrol.scheduler_ir.strategies.line import Line

Place = tuple[float, float, int, WaitingRequest]
"""Rank, arrival, number of coming, and the request; numbers differ, so that requests are never compared."""

_WIDTH: Final = 0.25


class Ladder:
    """Places in ascending order, no two of one number.

    ``add`` and ``remove`` are O(1) in far buckets, else as in a ``Line`` of what is near. A look opens the buckets that
    it comes to, each once; nobody can see that.
    """

    __slots__ = ("_far", "_keys", "_near", "_opened")

    def __init__(self) -> None:
        self._near: Line[Place] = Line()
        self._far: dict[float, dict[int, Place]] = {}
        self._keys: list[float] = []  # of the far buckets
        self._opened = -inf  # the last key that was

    def __len__(self) -> int:
        """O(buckets)."""
        return len(self._near) + sum(map(len, self._far.values()))

    def __bool__(self) -> bool:
        return bool(self._near) or bool(self._far)

    def __iter__(self) -> Iterator[Place]:
        return chain(self._near, self._behind())

    @property
    def first(self) -> Place | None:
        """None when there is none."""
        if not self._near and self._keys:
            self._open()
        return self._near.first if self._near else None

    def pop_until(self, rank: float) -> list[Place]:
        """Take out all whose rank is no more than this."""
        gone: list[Place] = []
        while (first := self.first) is not None and first[0] <= rank:
            gone.append(self._near.pop_first())
        return gone

    def add(self, place: Place) -> None:
        """Put a place where it belongs."""
        key = place[0] // _WIDTH
        if key <= self._opened:
            self._near.add(place)
        elif (bucket := self._far.get(key)) is not None:
            bucket[place[2]] = place
        else:
            self._add_first(place)

    def _add_first(self, place: Place) -> None:
        """Put a place where no other far one is, or whose rank is infinite."""
        key = _key(place[0])
        if key <= self._opened:
            self._near.add(place)
            return
        bucket = self._far.get(key)
        if bucket is None:
            bucket = self._far[key] = {}
            insort(self._keys, key)
        bucket[place[2]] = place

    def remove(self, place: Place) -> None:
        """Take a place out; raises ``KeyError`` when it isn't there."""
        key = place[0] // _WIDTH
        if key <= self._opened:
            self._near.remove(place)
            return
        bucket = self._far.get(key)
        if bucket is None:  # the rank may be infinite
            key = _key(place[0])
            if key <= self._opened:
                self._near.remove(place)
                return
            bucket = self._far[key]
        del bucket[place[2]]
        if not bucket:
            del self._far[key], self._keys[bisect_left(self._keys, key)]

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the parts contradict each other."""
        self._near.check_integrity()
        far = [(key, *item) for key, bucket in self._far.items() for item in bucket.items()]
        if (
            sorted(self._far) != self._keys
            or not all(self._far.values())
            or any(_key(place[0]) > self._opened for place in self._near)
            or any(key != _key(place[0]) or key <= self._opened or number != place[2] for key, number, place in far)
        ):
            raise AssertionError("a ladder is out of order or not whole")

    def _behind(self) -> Iterator[Place]:
        """Give those of far buckets, which it opens."""
        while self._keys:
            yield from self._open()

    def _open(self) -> list[Place]:
        """Bring the nearest of the far buckets near, and return what was in it."""
        self._opened = self._keys.pop(0)
        places = sorted(self._far.pop(self._opened).values())
        self._near.append(places)
        return places


def _key(rank: float) -> float:
    key = rank // _WIDTH
    return key if key == key else rank  # noqa: PLR0124 - no number where the rank is infinite
