"""The usable instances as a policy sees them: what each has to do, how fast it is, what it holds of a prompt.

Made for each request, over all instances, so little of it is made anew. Of an instance that holds nothing of the prompt
everything is known beforehand; its candidate is kept, in a *seat*, until one of the things changes that it says:

    the instance's snapshot  a health check brought another one
    its tally                a request came or went
    its speeds               an answer of its own was observed, or the calibration has a new ``version`` for all
    its age                  the work that it was given lately has lost a half percent: all seats at once

Seats are kept in columns, so that those which changed are found by comparing one list with another. The one that was
made from a seat for the last prompt of which the instance held some is kept as well: prompts with the same beginning
find the same candidates, and a policy that compares them with the last ones sees that nothing has changed.

``NaiveCandidates`` in the tests keeps nothing and is what this is compared with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, count
from operator import attrgetter, is_, ne
from typing import Final

from gateway.fingerprint import Fingerprint, Gap
from gateway.lookups import Cached, Lookups
from gateway.registry import Instance, LoadTracker, Tally
from gateway.routing import Calibration, Candidate, LearnedAffinity, RecentRoutes, Speeds
from kvcontrol.core.blocks import CacheIdentity, CacheTier
from kvcontrol.core.control import InstanceStats
from kvcontrol.core.ids import InstanceId
from kvcontrol.prefix_reuse import FleetIndex

_ASSUMED_BYTES_PER_S = {CacheTier.DDR: 8e9, CacheTier.NVME: 1e9, CacheTier.REMOTE: 0.5e9}
_PATHS_UP = {
    CacheTier.DDR: ("ddr_to_hbm",),
    CacheTier.NVME: ("nvme_to_ddr", "ddr_to_hbm"),
}
_AGES_S: Final = 0.2
"""After this long the work that an instance was given lately counts for half a percent less."""
_NEVER: Final = float("inf")
_MOST_KEPT: Final = 1024
_ANEW: Final = -1
"""No tally has changed so often: the seat is made anew."""
_changes = attrgetter("changes")
_make = partial(tuple.__new__, Candidate)
"""``Candidate._make`` for a tuple that is known to be of its length."""
_RECENT: Final = Candidate._fields.index("recent_tokens")


@dataclass(slots=True)
class _Reload:
    """Seconds to bring a token up from each tier, and the speeds of whoever has these times and was measured so."""

    times: dict[CacheTier, float]
    measured: Speeds | None = None
    speeds: Speeds | None = None

    def with_times(self, measured: Speeds) -> Speeds:
        """Return measured speeds with these times."""
        if self.measured is not measured or self.speeds is None:
            self.measured = measured
            self.speeds = replace(measured, reload_s_per_token=self.times) if self.times else measured
        return self.speeds


@dataclass(frozen=True, slots=True)
class _List:
    """Instances that were asked about together: their seats, and which identities their caches have."""

    instances: tuple[Instance, ...]
    seats: tuple[int, ...]
    identities: tuple[CacheIdentity | None, ...]
    snapshots: int


class Candidates:
    """Owns the seats. A request costs O(instances) in C, and O(1) for each that changed or holds some of the prompt."""

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        *,
        index: FleetIndex,
        load: LoadTracker,
        recent: RecentRoutes,
        learned: LearnedAffinity,
        calibration: Calibration,
        clock: Callable[[], float],
    ) -> None:
        self._index = index
        self._load = load
        self._recent = recent
        self._learned = learned
        self._calibration = calibration
        self._clock = clock
        self._lives: dict[InstanceId, int] = {}
        self._identities: dict[CacheIdentity, CacheIdentity] = {}
        self._reloads: dict[InstanceId, tuple[InstanceStats, _Reload]] = {}
        self._reload_times: dict[tuple[tuple[CacheTier, float], ...], _Reload] = {}
        self._clear()

    def _clear(self) -> None:
        self._places: dict[InstanceId, int] = {}
        self._instances: list[Instance] = []
        self._tallies: list[Tally] = []
        self._seen_changes: list[int] = []
        self._kinds: list[CacheIdentity | None] = []
        self._ups: list[_Reload | None] = []
        self._seats: list[Candidate] = []
        self._holding: list[Candidate | None] = []
        self._lists: dict[InstanceId, _List] = {}
        self._snapshots = 0
        self._version = 0
        self._until_s = _NEVER

    def lookups(self, fingerprint: Fingerprint | Gap) -> Lookups:
        """Return what will say who holds what of a prompt; valid until the index changes."""
        return Lookups(fingerprint, self._index, self._recent, self._clock())

    def of(self, instances: Sequence[Instance], lookups: Lookups) -> tuple[Candidate, ...]:
        """Return each instance as a candidate for a prompt, in their order."""
        if not instances:
            return ()
        asked = self._list(instances)
        self._refresh()
        found = self._seats.copy()
        for identity in asked.identities:
            cached = lookups.under(identity)
            if cached is not None:
                self._show(cached, identity, found)
        return tuple([found[at] for at in asked.seats])

    def cached(self, instance: Instance, lookups: Lookups) -> Cached | None:
        """Return what is cached of a prompt under an instance's identity; None where it can't be named so."""
        if instance.stats is None:
            return lookups.under(None)
        at = self._places.get(instance.id)
        known = at is not None and self._instances[at] is instance
        return lookups.under(self._kinds[at] if at is not None and known else self._interned(instance.stats.identity))

    def speeds(self, instance: Instance) -> Speeds | None:
        """Return how fast an instance is; None before anything is known."""
        measured, stats = self._calibration.speeds(instance.id), instance.stats
        if measured is None or stats is None:
            return measured
        return self._reload(instance.id, stats).with_times(measured)

    def observed(self, instance: InstanceId) -> None:
        """An instance's speeds have changed by an answer of its own."""
        at = self._places.get(instance)
        if at is not None:
            self._seen_changes[at] = _ANEW

    def forget(self, instance: InstanceId) -> None:
        """An instance is gone. All seats are made anew, which is as seldom."""
        self._clear()
        self._reloads.pop(instance, None)
        self._lives.pop(instance, None)

    def _list(self, instances: Sequence[Instance]) -> _List:
        """Return what is known of a list; lists are kept by who is first in them, of which there are few."""
        known = self._lists.get(instances[0].id)
        if (
            known is None
            or known.snapshots != self._snapshots
            or len(known.instances) != len(instances)
            or not all(map(is_, known.instances, instances))
        ):
            seats = tuple([self._seat(each) for each in instances])
            known = self._lists[instances[0].id] = _List(
                instances=tuple(instances),
                seats=seats,
                identities=tuple(dict.fromkeys(self._kinds[at] for at in seats)),
                snapshots=self._snapshots,
            )
        return known

    def _seat(self, instance: Instance) -> int:
        """Return an instance's place, after seating it or its new snapshot where need be."""
        at = self._places.get(instance.id)
        if at is not None and self._instances[at] is instance:
            return at
        stats = instance.stats
        if stats is None and self._lives.get(instance.id) != instance.life:
            self._learned.forget(instance.id)  # it was away: whoever is there now may have an empty cache
            self._lives[instance.id] = instance.life
        if at is None:
            at = self._places[instance.id] = len(self._seats)
            self._instances.append(instance)
            self._tallies.append(self._load.tally(instance.id))
            self._seen_changes.append(_ANEW)
            self._kinds.append(None)
            self._ups.append(None)
            self._seats.append(Candidate(instance.id))
            self._holding.append(None)
        else:
            self._snapshots += 1
        self._instances[at] = instance
        self._tallies[at] = self._load.tally(instance.id)
        self._seen_changes[at] = _ANEW
        self._kinds[at] = None if stats is None else self._interned(stats.identity)
        self._ups[at] = None if stats is None else self._reload(instance.id, stats)
        return at

    def _refresh(self) -> None:
        """Make the seats anew whose instances have changed."""
        now_s = self._clock()
        changes = list(map(_changes, self._tallies))
        if changes != self._seen_changes:
            for at in compress(count(), map(ne, changes, self._seen_changes)):
                self._seats[at] = seated = self._seated(self._instances[at], self._tallies[at])
                self._holding[at] = None
                if seated.recent_tokens:
                    self._until_s = min(self._until_s, now_s + _AGES_S)
            self._seen_changes = changes
        if self._until_s <= now_s:
            self._age(now_s)
        if self._version != self._calibration.version:
            self._tell_speeds()

    def _seated(self, instance: Instance, tally: Tally) -> Candidate:
        stats = instance.stats
        return Candidate(
            instance=instance.id,
            in_flight=tally.in_flight,
            prefill_tokens=tally.prefill_tokens,
            foreign_requests=instance.foreign_requests,
            slots=0 if stats is None else stats.load.max_batch_size,
            recent_tokens=self._load.recent_tokens(tally),
            last_turn=tally.last_turn,
            last_cold_turn=tally.last_cold_turn,
            speeds=self.speeds(instance),
        )

    def _age(self, now_s: float) -> None:
        """All that was given lately is a little older."""
        recent = self._load.all_recent_tokens(self._tallies)
        self._until_s = now_s + _AGES_S if any(recent) else _NEVER
        self._seats = [
            _make((*seat[:_RECENT], tokens, *seat[_RECENT + 1 :]))
            for seat, tokens in zip(self._seats, recent, strict=True)
        ]
        self._holding = [None] * len(self._seats)

    def _tell_speeds(self) -> None:
        """All get the new speeds together."""
        self._version = self._calibration.version
        measured = map(self._calibration.speeds, self._places)  # in the order of the seats
        told = [
            speeds if up is None or speeds is None else up.speeds if up.measured is speeds else up.with_times(speeds)
            for speeds, up in zip(measured, self._ups, strict=True)
        ]
        self._seats = [_make((*seat[:-1], speeds)) for seat, speeds in zip(self._seats, told, strict=True)]
        self._holding = [None] * len(self._seats)

    def _show(self, cached: Cached, identity: CacheIdentity | None, found: list[Candidate]) -> None:
        """Put those that hold some of the prompt in place of their seats."""
        places, kinds, seats, holding = self._places, self._kinds, self._seats, self._holding
        for name in cached.concerned:
            at = places.get(name)
            if at is not None and kinds[at] is identity:
                found[at] = holding[at] = cached.seen_by(seats[at], holding[at])

    def _interned(self, identity: CacheIdentity) -> CacheIdentity:
        """One object for equal identities: to compare them costs nothing then."""
        if len(self._identities) > _MOST_KEPT:
            self._identities.clear()
        return self._identities.setdefault(identity, identity)

    def _reload(self, instance: InstanceId, stats: InstanceStats) -> _Reload:
        """One object for equal times."""
        known = self._reloads.get(instance)
        if known is None or known[0] is not stats:
            if len(self._reload_times) > _MOST_KEPT:
                self._reload_times.clear()
            times = _times_up(stats)
            reload = self._reload_times.setdefault(tuple(times.items()), _Reload(times))
            known = self._reloads[instance] = (stats, reload)
        return known[1]


def _times_up(stats: InstanceStats) -> dict[CacheTier, float]:
    """Seconds to bring one token's KV from each tier into HBM, by measured bandwidth where there is one."""
    times: dict[CacheTier, float] = {}
    for tier, assumed in _ASSUMED_BYTES_PER_S.items():
        held = stats.tiers.get(tier)
        if held is None or not held.block_bytes:
            continue
        bytes_per_token = held.block_bytes / stats.identity.block_size_tokens
        seconds = 0.0
        for path in _PATHS_UP.get(tier, ()):
            measured = stats.offload.paths.get(path) if stats.offload is not None else None
            speed = measured.bandwidth_bytes_per_s if measured is not None else 0.0
            seconds += bytes_per_token / (speed if speed > 0 else assumed)
        times[tier] = seconds or bytes_per_token / assumed
    return times


__all__ = ["Candidates"]
