"""Shadow policies: the hit ratio of each candidate on sampled live requests.

Every candidate runs a *ghost cache*: the policy over keys alone, no memory behind them. It follows every 2^n-th key,
by hash, in a cache that is as much smaller (spatial sampling: Waldspurger and others, FAST 2015), with at most
``SAMPLE_BLOCKS`` blocks. Keys are chained, so the sampled keys of a prompt are in its order, and a prompt's hits end
at the first of them that is not there, as in a real prefix cache. As in a replay, what is there is counted before
anything is touched, and the deepest block is touched first.

Following is put off: a request is only noted, and followed by ``work``, a piece at a time, when nobody waits. The cost
is bounded by measurement: the time spent is counted, and requests are skipped (for all candidates alike, and counted)
whenever it would exceed ``MOST_LOAD`` of one core, or when too much waits to be followed. Whoever owns the stream owns
this; only ``report`` may be called from another thread.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy.allowed import PolicyError, check_capacity, check_keys, check_number
from kvcontrol.kv_policy.eviction import ContentKey, EvictionPolicy, PolicyContext
from kvcontrol.kv_policy.ghost_lru import sampled, sampling_shift
from kvcontrol.kv_policy.spec import PolicySpec

SAMPLE_BLOCKS: Final = 256
_LEAST_SHIFT: Final = 3
"""At most every eighth key, where that leaves enough: following all of a small cache costs as much as the cache."""
MOST_LOAD: Final = 0.01
"""Share of one core that all candidates together may take."""
MOST_CANDIDATES: Final = 16
WINDOW_S: Final = 60.0
_BURST_S: Final = 0.05
"""What may be spent at once after a quiet time."""
_MOST_WAITING: Final = 1_024
"""Pieces of work, each a candidate's for one request, that wait at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowStanding:
    """One candidate: sampled blocks looked up and found, in total and in the last full window (None before its end)."""

    policy: str
    lookups: int
    hits: int
    window_hit_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowReport:
    """All candidates. ``sampled_ratio`` is the share of keys that are followed; the load is of one core."""

    standings: tuple[ShadowStanding, ...]
    window_s: float
    sampled_ratio: float
    requests: int
    skipped_requests: int
    busy_s: float


class ShadowPolicies:
    """See the module's text. ``PolicyError`` for candidates that there aren't, or too many of them."""

    def __init__(
        self,
        candidates: Sequence[PolicySpec],
        *,
        capacity_blocks: int,
        clock: Callable[[], float] = time.monotonic,
        timer: Callable[[], float] = time.perf_counter,
        window_s: float = WINDOW_S,
    ) -> None:
        if len(candidates) > MOST_CANDIDATES:
            raise PolicyError(f"{len(candidates)} shadow policies; allowed are {MOST_CANDIDATES} at most")
        check_capacity(capacity_blocks)
        check_number("window_s", window_s, above=0)
        self._shift = sampling_shift(capacity_blocks, SAMPLE_BLOCKS)
        if capacity_blocks >= SAMPLE_BLOCKS:
            self._shift = max(self._shift, _LEAST_SHIFT)
        capacity = max(1, capacity_blocks >> self._shift)
        self._ghosts = tuple(
            _GhostCache(choice.text, choice.make(capacity_blocks=capacity), capacity) for choice in candidates
        )
        self._clock, self._timer = clock, timer
        self._window_s = window_s
        self._began_s = self._window_began_s = self._refilled_s = clock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._budget_s = _BURST_S
        self._busy_s = 0.0
        self._requests = self._skipped = 0

    @property
    def candidates(self) -> tuple[str, ...]:
        """The candidates as they were written."""
        return tuple(ghost.text for ghost in self._ghosts)

    def requested(self, prompt: Sequence[ContentKey]) -> None:
        """Note a request: the keys of its whole blocks, in prompt order. O(keys) to choose those of the sample."""
        if not self._ghosts or not self._affordable():
            return
        keys = self._sampled(prompt)
        self._requests += 1
        if keys:
            self._waiting.extend(partial(ghost.follow, keys) for ghost in self._ghosts)

    def stored(self, keys: Sequence[ContentKey]) -> None:
        """Note blocks that became resident without a look-up: those that a request decoded, in prompt order."""
        if self._ghosts and self._affordable() and (found := self._sampled(keys)):
            self._waiting.extend(partial(ghost.touch, found) for ghost in self._ghosts)

    def work(self) -> bool:
        """Follow the next part of the notes and return whether more is pending; O(sampled keys of one request)."""
        if self._waiting:
            started = self._timer()
            self._waiting.popleft()()
            self._spent(self._timer() - started)
        return bool(self._waiting)

    def settle(self) -> None:
        """Follow all that was noted."""
        while self.work():
            pass

    def report(self) -> ShadowReport:
        """Return how the candidates stand; any thread (then numbers may be a moment apart)."""
        return ShadowReport(
            standings=tuple(ghost.standing() for ghost in self._ghosts),
            window_s=self._window_s,
            sampled_ratio=1 / (1 << self._shift),
            requests=self._requests,
            skipped_requests=self._skipped,
            busy_s=self._busy_s,
        )

    def _affordable(self) -> bool:
        now_s = self._clock()
        if now_s - self._window_began_s >= self._window_s:
            self._window_began_s = now_s
            self._waiting.extend(ghost.end_window for ghost in self._ghosts)
        self._budget_s = min(_BURST_S, self._budget_s + (now_s - self._refilled_s) * MOST_LOAD)
        self._refilled_s = now_s
        if self._budget_s > 0 and len(self._waiting) < _MOST_WAITING:
            return True
        self._skipped += 1
        return False

    def _sampled(self, keys: Sequence[ContentKey]) -> list[ContentKey]:
        started = self._timer()
        shift = self._shift
        check_keys(keys)
        found = [key for key in keys if sampled(key, shift)]
        self._spent(self._timer() - started)
        return found

    def _spent(self, seconds: float) -> None:
        self._busy_s += seconds
        self._budget_s -= seconds


class _GhostCache:
    """One policy over keys."""

    def __init__(self, text: str, policy: EvictionPolicy, capacity: int) -> None:
        self.text = text
        self._policy = policy
        self._capacity = capacity
        self._places: dict[ContentKey, BlockId] = {}
        self._keys: dict[BlockId, ContentKey] = {}
        self._next = 0
        self._lookups = self._hits = 0
        self._window_lookups = self._window_hits = 0
        self._ratio: float | None = None

    def follow(self, keys: Sequence[ContentKey]) -> None:
        self._look_up(keys)
        self.touch(keys)

    def _look_up(self, keys: Sequence[ContentKey]) -> None:
        places = self._places
        self._policy.requested(keys, block_tokens=1, prompt_tokens=len(keys))
        hits = 0
        for key in keys:
            if key not in places:
                break
            hits += 1
        self._lookups += len(keys)
        self._hits += hits
        self._window_lookups += len(keys)
        self._window_hits += hits

    def touch(self, keys: Sequence[ContentKey]) -> None:
        places, policy = self._places, self._policy
        for key in reversed(keys):
            place = places.get(key)
            if place is not None:
                policy.access((place,))
                continue
            if len(places) >= self._capacity:
                context = PolicyContext(
                    tier=CacheTier.HBM,
                    wanted_blocks=1,
                    used_blocks=len(places),
                    capacity_blocks=self._capacity,
                    incoming=(key,),
                )
                for victim in policy.select_victims(context).victims:
                    del places[self._keys.pop(victim)]
            place = BlockId(self._next)
            self._next += 1
            places[key] = place
            self._keys[place] = key
            policy.insert((place,), (key,))

    def end_window(self) -> None:
        self._ratio = self._window_hits / self._window_lookups if self._window_lookups else None
        self._window_lookups = self._window_hits = 0

    def standing(self) -> ShadowStanding:
        return ShadowStanding(policy=self.text, lookups=self._lookups, hits=self._hits, window_hit_ratio=self._ratio)
