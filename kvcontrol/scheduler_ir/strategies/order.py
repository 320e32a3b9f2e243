"""What a strategy says of its order; ageing comes from the ``AgedQueue`` around it."""

from collections.abc import Iterator
from typing import ClassVar, Protocol

from kvcontrol.scheduler_ir.strategies.base import EngineView, WaitingRequest

Arrival = tuple[float, int, WaitingRequest]
"""Arrival, number of coming, and the request."""


class Order(Protocol):
    """An order without ageing, which an ``AgedQueue`` adds. It is told of each request once and never asked whether it
    knows one.
    """

    name: ClassVar[str]

    @property
    def state(self) -> str:
        """What a strategy that chooses between orders follows now; empty for the others."""
        ...

    def add(self, request: WaitingRequest, number: int) -> None:
        """Take in a request; ``number`` is larger than all before."""
        ...

    def remove(self, request: WaitingRequest) -> None:
        """Take out one that leaves without its turn."""
        ...

    def start(self, request: WaitingRequest, now_s: float) -> None:
        """Take out one that goes on now."""
        ...

    def following(self, most: int, after_s: float, now_s: float, view: EngineView) -> Iterator[WaitingRequest]:
        """Give those that arrived after ``after_s``, in order; no more than ``most`` will be asked for. ``after_s`` is
        -inf where all did: then nobody has to be asked.
        """
        ...

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the parts contradict each other."""
        ...
