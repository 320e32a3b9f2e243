"""How important a request is: the gateway says it of a tenant, an engine orders what waits by it."""

from enum import StrEnum


class Priority(StrEnum):
    """A class; what a higher one means is up to whoever orders."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"

    @property
    def level(self) -> int:
        """Higher is more important; 0 is the ordinary."""
        return _LEVELS[self]


_LEVELS = {Priority.HIGH: 1, Priority.NORMAL: 0, Priority.LOW: -1}
