"""Ghost list: the newest keys of evicted blocks, each with a value."""

from collections import OrderedDict
from typing import Generic, TypeVar

from kvcontrol.kv_policy.base import OLDEST
from kvcontrol.kv_policy.eviction import ContentKey

Value = TypeVar("Value")


class GhostList(Generic[Value]):
    """At most ``capacity`` keys, the one put in longest ago leaves first. Every call is O(1)."""

    __slots__ = ("_line", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._line: OrderedDict[ContentKey, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, key: ContentKey) -> bool:
        return key in self._line

    def put(self, key: ContentKey, value: Value) -> Value | None:
        """Remember a key as the newest, with a new value if it was remembered already.

        Returns the value of the key that is forgotten for it, None where there is room.
        """
        line = self._line
        before = len(line)
        line[key] = value
        if len(line) == before:
            line.move_to_end(key)
        elif before >= self.capacity:
            return line.popitem(OLDEST)[1]
        return None

    def take(self, key: ContentKey) -> Value | None:
        """Forget a key and return its value; None when it isn't remembered."""
        return self._line.pop(key, None)
