"""A sorted line of thousands that is changed many times a step: short lists, one after the other.

One list is what ``bisect`` makes of it: a place is found in O(log n), and then all pointers behind it move, 80 KB of
them where the first of ten thousand leaves. In chunks that is a kilobyte. A balanced tree in Python costs more than
either; a heap can't show its first hundred without losing them, and what was cancelled stays in it.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain
from typing import Any, Final, Generic, TypeVar

Item = TypeVar("Item", bound=tuple[Any, ...])

CHUNK: Final = 256
"""Items that a chunk has at most before it is halved."""


class Line(Generic[Item]):
    """Items in ascending order, all different.

    ``add`` and ``remove`` are O(log n + n / CHUNK + CHUNK), all but the first of it in C; to take the first one out
    nothing is compared.
    """

    __slots__ = ("_chunks", "_lasts", "_size")

    def __init__(self) -> None:
        self._chunks: list[list[Item]] = []
        self._lasts: list[Item] = []  # of each chunk
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Item]:
        return chain.from_iterable(self._chunks)

    def __bool__(self) -> bool:
        return self._size > 0

    @property
    def first(self) -> Item:
        """Raises ``IndexError`` for an empty line."""
        return self._chunks[0][0]

    def add(self, item: Item) -> None:
        """Put an item in its place."""
        self._size += 1
        lasts = self._lasts
        if not lasts:
            self._chunks.append([item])
            lasts.append(item)
            return
        at = bisect_left(lasts, item)
        if at == len(lasts):
            at -= 1
            chunk = self._chunks[at]
            chunk.append(item)
            lasts[at] = item
        else:
            chunk = self._chunks[at]
            insort(chunk, item)
        if len(chunk) > CHUNK:
            half = chunk[: CHUNK // 2]
            del chunk[: CHUNK // 2]
            self._chunks.insert(at, half)
            lasts.insert(at, half[-1])

    def append(self, items: list[Item]) -> None:
        """Put items, in ascending order, behind all others."""
        for begin in range(0, len(items), CHUNK):
            chunk = items[begin : begin + CHUNK]
            self._chunks.append(chunk)
            self._lasts.append(chunk[-1])
        self._size += len(items)

    def remove(self, item: Item) -> None:
        """Take an item out; raises ``KeyError`` when it isn't there."""
        lasts = self._lasts
        if lasts and self._chunks[0][0] is item:  # as mostly: its turn has come
            self.pop_first()
            return
        at = bisect_left(lasts, item)
        if at == len(lasts):
            raise KeyError(item)
        chunk = self._chunks[at]
        place = bisect_left(chunk, item)
        if chunk[place] != item:
            raise KeyError(item)
        del chunk[place]
        self._size -= 1
        if not chunk:
            del self._chunks[at], lasts[at]
        elif place == len(chunk):
            lasts[at] = chunk[-1]

    def pop_first(self) -> Item:
        """Take the first item out; raises ``IndexError`` for an empty line. Nothing has to be found for it."""
        chunk = self._chunks[0]
        first = chunk.pop(0)
        self._size -= 1
        if not chunk:
            del self._chunks[0], self._lasts[0]
        return first

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the parts contradict each other."""
        whole = list(self)
        if (
            sorted(whole) != whole
            or len(whole) != self._size
            or [chunk[-1] for chunk in self._chunks] != self._lasts
            or any(not 0 < len(chunk) <= CHUNK for chunk in self._chunks)
        ):
            raise AssertionError("a line is out of order or not whole")
