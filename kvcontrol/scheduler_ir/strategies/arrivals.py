"""A line of thousands that come nearly always at its end: what is ordered by arrival.

Those that came in order are a linked dictionary, where coming, leaving from anywhere and looking at the first cost a
tenth of what they cost in a ``Line``. The few that came late (one that was preempted comes back with its old arrival)
are in a ``Line`` of their own, and whoever looks is shown both as one.
"""

from collections import OrderedDict
from collections.abc import Iterator
from heapq import merge
from typing import Any, Generic, TypeVar

from kvcontrol.scheduler_ir.strategies.base import WaitingId
from kvcontrol.scheduler_ir.strategies.line import Line

Item = TypeVar("Item", bound=tuple[Any, ...])


class Arrivals(Generic[Item]):
    """Items in ascending order, all different, each of one request.

    ``add`` and ``remove`` are O(1) for what comes in order, else as in a ``Line``.
    """

    __slots__ = ("_in_order", "_late", "_late_items", "_newest")

    def __init__(self) -> None:
        self._in_order: OrderedDict[WaitingId, Item] = OrderedDict()
        self._late: Line[Item] = Line()
        self._late_items: dict[WaitingId, Item] = {}
        self._newest: Item | None = None

    def __len__(self) -> int:
        return len(self._in_order) + len(self._late_items)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._in_order or request_id in self._late_items

    def __iter__(self) -> Iterator[Item]:
        if self._late_items:
            return merge(self._in_order.values(), self._late)
        return iter(self._in_order.values())

    @property
    def first(self) -> Item | None:
        """None when there is none."""
        if self._late_items:
            first = self._late.first
            return min(first, next(iter(self._in_order.values()), first))
        for item in self._in_order.values():
            return item
        return None

    def add(self, request_id: WaitingId, item: Item) -> None:
        """Put an item in its place; its request has none yet."""
        if self._newest is None or item > self._newest:
            self._in_order[request_id] = self._newest = item
        else:
            self._late_items[request_id] = item
            self._late.add(item)

    def remove(self, request_id: WaitingId) -> Item:
        """Take a request's item out; raises ``KeyError`` when it has none."""
        item = self._in_order.pop(request_id, None)
        if item is None:
            item = self._late_items.pop(request_id)
            self._late.remove(item)
        return item

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the parts contradict each other."""
        self._late.check_integrity()
        whole = list(self)
        if (
            sorted(whole) != whole
            or len(whole) != len(self)
            or sorted(self._late_items.values()) != list(self._late)
            or self._in_order.keys() & self._late_items.keys()
        ):
            raise AssertionError("arrivals are out of order or not whole")
