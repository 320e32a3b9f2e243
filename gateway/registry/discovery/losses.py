"""Decides whether a source may remove instances: at most half of them in a window, more if the loss lasts.

Pure: the caller passes the time. An instance is lost if the source no longer contains its URL, also where its id stays.
A loss counts for the whole window, so that several small losses add up. A larger loss is accepted after a whole window
without a further loss: each further loss starts the window again.
Rejected: a time for each instance. A source that shrinks again and again is broken, and its earlier losses are as
doubtful as the newest one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.http.endpoint import Endpoint
from gateway.registry.instance import InstanceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """More than half of ``of`` instances are ``lost``; this is accepted at ``until`` if no more is lost before."""

    lost: tuple[InstanceSpec, ...]
    of: int
    until: float


class LossWindow:
    """Remembers which instances a source named within the last ``window_s``. Each call costs one pass over them."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._accepted: dict[Endpoint, InstanceSpec] = {}
        self._left: dict[Endpoint, tuple[InstanceSpec, float]] = {}
        self._doubted: frozenset[Endpoint] = frozenset()
        self._since: float | None = None

    def judge(self, named: Sequence[InstanceSpec], now: float) -> Loss | None:
        """Accept ``named`` as the source's instances and return None, or return the loss that has to last first."""
        self._left = {place: left for place, left in self._left.items() if now - left[1] < self._window_s}
        there = {each.endpoint: each for each in named}
        before = {place: spec for place, (spec, _) in self._left.items()} | self._accepted
        lost = tuple(spec for place, spec in before.items() if place not in there)
        if 2 * len(lost) <= len(before):
            self._accept(there, left_at=now)
            return None
        if self._since is None or not self._doubted <= there.keys():
            self._since = now
        self._doubted = frozenset(there)
        until = self._since + self._window_s
        if now >= until:
            self._accept(there, left_at=self._since)
            return None
        return Loss(lost=lost, of=len(before), until=until)

    def interrupt(self) -> None:
        """Note that the source can't be read: a loss that is not accepted yet starts its window again."""
        self._since = None

    def _accept(self, there: dict[Endpoint, InstanceSpec], *, left_at: float) -> None:
        for place, spec in self._accepted.items():
            self._left[place] = spec, left_at
        self._left = {place: left for place, left in self._left.items() if place not in there}
        self._accepted = there
        self._since = None
