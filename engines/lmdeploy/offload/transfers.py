"""What the tiers note of transfers that are under way and of those that have ended."""

from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

_Order = TypeVar("_Order")


@dataclass(slots=True)
class Ended:
    """Transfers that ended: request ids of loads, operation ids of saves, and slots that a load could not fill."""

    loads: set[int] = field(default_factory=set)
    saves: set[int] = field(default_factory=set)
    invalid_slots: set[int] = field(default_factory=set)


class UnderWay(NamedTuple, Generic[_Order]):
    """A transfer that was started, and when it is given up for lost."""

    order: _Order
    lost_at_s: float


__all__ = ["Ended", "UnderWay"]
