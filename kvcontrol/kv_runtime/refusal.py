"""Why space was refused: a value that callers decide on, not an exception."""

from dataclasses import dataclass
from enum import StrEnum


class Shortage(StrEnum):
    """What stands in the way of an allocation."""

    FULL = "full"
    """There is not enough free space."""
    FRAGMENTED = "fragmented"
    """There is enough free space, but not in pieces of the wanted size: compaction or larger evictions would help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSpace:
    """Nothing was allocated: ``wanted`` blocks were asked for, ``available`` could have been given."""

    wanted: int
    available: int
    shortage: Shortage = Shortage.FULL


__all__ = ["NoSpace", "Shortage"]
