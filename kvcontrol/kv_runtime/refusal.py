"""Why space was refused: a value that callers decide on, not an exception."""

from dataclasses import dataclass
from enum import StrEnum


class Shortage(StrEnum):
    """Reason why an allocation was refused."""

    FULL = "full"
    """There is not enough free space."""
    FRAGMENTED = "fragmented"
    """There is enough free space, but not in pieces of the wanted size: compaction or larger evictions would help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSpace:
    """A refused allocation: ``wanted`` blocks were requested, ``available`` are free."""

    wanted: int
    available: int
    shortage: Shortage = Shortage.FULL
