"""Requests and tokens in flight at each instance, as sent by this gateway."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import exp2
from time import monotonic
from types import TracebackType
from typing import Self

from gateway.routing.base import CHUNK_TOKENS
from kvcontrol.core.ids import InstanceId

_HALF_LIFE_S = 30.0
_MOST_LOGGED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One instance's share. ``prefill_tokens`` are those of requests whose first byte is still awaited, without the
    cached ones, ``recent_tokens`` those of all lately (each counts half after 30 s). ``last_request`` and
    ``last_cold_request`` number the requests over the whole gateway; 0 is "never".
    """

    in_flight: int
    prefill_tokens: int
    last_request: int
    last_cold_request: int
    recent_tokens: float = 0.0


@dataclass(slots=True)
class Tally:
    """One instance's counts as they are now, for who looks often. Only the ``LoadTracker`` writes it; ``changed`` is
    its log.
    """

    instance: InstanceId
    changed: list[InstanceId]
    in_flight: int = 0
    prefill_tokens: int = 0
    chunked_tokens: int = 0
    """As many of them as are of prompts that are computed in several chunks."""
    last_request: int = 0
    last_cold_request: int = 0
    recent_tokens: float = 0.0
    recent_at_s: float = 0.0
    """When ``recent_tokens`` were so many."""
    answering: int = 0
    """As many of those in flight as have had their first byte."""
    idle: list[asyncio.Future[None]] = field(default_factory=list)


class Permit:
    """One request's places at an instance, which ``with`` gives back; ``first_byte`` says that its prefill is over."""

    __slots__ = ("_answering", "_counters", "_places", "_tokens")

    def __init__(self, counters: Tally, tokens: int, places: int) -> None:
        self._counters = counters
        self._tokens = tokens
        self._places = places
        self._answering = False
        counters.in_flight += places
        counters.prefill_tokens += tokens
        if tokens > CHUNK_TOKENS:
            counters.chunked_tokens += tokens
        counters.changed.append(counters.instance)

    def first_byte(self) -> None:
        """Idempotent."""
        if not self._answering:
            self._answering = True
            self._counters.answering += self._places
        self._prefilled()

    def _prefilled(self) -> None:
        if self._tokens:
            self._counters.prefill_tokens -= self._tokens
            if self._tokens > CHUNK_TOKENS:
                self._counters.chunked_tokens -= self._tokens
            self._counters.changed.append(self._counters.instance)
            self._tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Give the places back; once."""
        self._prefilled()
        if self._answering:
            self._counters.answering -= self._places
        self._counters.in_flight -= self._places
        self._counters.changed.append(self._counters.instance)
        if self._counters.idle and not self._counters.in_flight:
            for waiter in self._counters.idle:
                if not waiter.done():
                    waiter.set_result(None)
            self._counters.idle.clear()


class LoadTracker:
    """Counts in-flight requests, and one for which an engine runs several sequences as so many. Load is counted from
    the routing decision on, not from the first answer, so that a burst spreads; a permit is given back however the
    request ends. An instance that was never given anything, or is forgotten, has no load.

    ``changed`` logs whose counts have changed, other than by growing old: who looks often reads on where it has read up
    to, as long as ``epoch`` is the same. In a new one anybody's may have.
    """

    def __init__(self, instances: Iterable[InstanceId] = (), *, clock: Callable[[], float] = monotonic) -> None:
        self.changed: list[InstanceId] = []
        self.epoch = 0
        self._counters = {instance: Tally(instance, self.changed) for instance in instances}
        self._clock = clock
        self._request_number = 0

    def of(self, instance: InstanceId) -> Load:
        counters = self._counters.get(instance) or _NOTHING
        return Load(
            in_flight=counters.in_flight,
            prefill_tokens=counters.prefill_tokens,
            last_request=counters.last_request,
            last_cold_request=counters.last_cold_request,
            recent_tokens=self.recent_tokens(counters),
        )

    def in_flight(self, instance: InstanceId) -> int:
        """Return how many requests of ours an instance has."""
        counters = self._counters.get(instance)
        return 0 if counters is None else counters.in_flight

    def answering(self, instance: InstanceId) -> int:
        """Return how many of them have had the first byte of their answer."""
        counters = self._counters.get(instance)
        return 0 if counters is None else counters.answering

    def tally(self, instance: InstanceId) -> Tally:
        """Return an instance's own counts, which stay its own until it is forgotten."""
        counters = self._counters.get(instance)
        if counters is None:
            counters = self._counters[instance] = Tally(instance, self.changed)
        return counters

    @property
    def total(self) -> int:
        """Requests at all instances together."""
        return sum(each.in_flight for each in self._counters.values())

    def placed(self, instance: InstanceId, *, uncached_tokens: int, cold: bool, places: int = 1) -> Permit:
        """Count a request at an instance from now on, until its permit is given back; it has so many ``places``."""
        counters = self.tally(instance)
        self._request_number += 1
        counters.last_request = self._request_number
        counters.recent_tokens = self.recent_tokens(counters) + uncached_tokens
        counters.recent_at_s = self._clock()
        if cold:
            counters.last_cold_request = self._request_number
        if len(self.changed) > _MOST_LOGGED:
            self.changed.clear()
            self.epoch += 1
        return Permit(counters, uncached_tokens, places)

    def recent_tokens(self, counters: Tally) -> float:
        """Return the uncached tokens that an instance was given, each counting half after 30 s."""
        return counters.recent_tokens * faded(self._clock() - counters.recent_at_s) if counters.recent_tokens else 0.0

    def now_s(self) -> float:
        """Return the time by which work grows old."""
        return self._clock()

    async def until_idle(self, instance: InstanceId) -> None:
        """Return when nothing of ours is left at an instance; whoever waits bounds the wait."""
        counters = self._counters.get(instance)
        while counters is not None and counters.in_flight:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            counters.idle.append(waiter)
            await waiter

    def forget(self, instance: InstanceId) -> None:
        """Stop counting for an instance that is gone; permits that are still out are given back to nobody."""
        self._counters.pop(instance, None)


def faded(after_s: float) -> float:
    """Return what work counts for so long after it was given: 1 at once, a half after 30 s."""
    return exp2(-after_s / _HALF_LIFE_S)


_NOTHING = Tally(InstanceId(""), [])
