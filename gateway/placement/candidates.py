"""The usable instances as input of a routing policy: load, speed, and residency of a prompt.

Asked for with each request, over all instances, so little of it is made anew. What instances have to do stands in the
columns of a ``CandidateColumns``, where that changes which has changed since the last request:

    the instance's snapshot  a health check brought another one
    its tally                a request came or went
    its speeds               an answer of its own was observed, or the calibration has a new ``version`` for all

``NaiveCandidates`` in the tests keeps nothing and is what this is compared with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress, count, repeat
from operator import is_, is_not
from typing import Final

from gateway.fingerprint import Fingerprint, Gap
from gateway.placement.candidate_table import CandidateTable
from gateway.placement.lookups import Cached, Lookups
from gateway.registry import Instance, LoadTracker
from gateway.routing import NOTHING_HELD, Calibration, Field, Held, LearnedAffinity, RecentRoutes, Speeds
from kvcontrol.core.blocks import CacheIdentity, CacheTier
from kvcontrol.core.control import InstanceStats
from kvcontrol.core.ids import InstanceId
from kvcontrol.prefix_reuse import FleetIndex

_ASSUMED_BYTES_PER_S = {CacheTier.DDR: 8e9, CacheTier.NVME: 1e9, CacheTier.REMOTE: 0.5e9}
_PATHS_UP = {
    CacheTier.DDR: ("ddr_to_hbm",),
    CacheTier.NVME: ("nvme_to_ddr", "ddr_to_hbm"),
}
_MOST_KEPT: Final = 1024
_MOST_TABLES: Final = 64


@dataclass(slots=True, eq=False)
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


class PromptField(Field):
    """The field of one prompt, and what of it is cached where."""

    __slots__ = ("_identities", "_index", "_lookups")

    def __init__(self, columns: CandidateTable, held: dict[int, Held], lookups: Lookups, index: FleetIndex) -> None:
        self.columns = columns
        self.held = held
        self._all = None
        self._identities = columns.identities
        self._lookups = lookups
        self._index = index

    def diverges(self, place: int) -> bool:
        cached = self.cached(place)
        matched, _, expected = self.held.get(place, NOTHING_HELD)
        if cached is None or not matched or expected > matched:
            return False
        blocks = matched // cached.block_tokens
        if blocks >= len(cached.hashes):
            return False
        return self._index.is_continued(self.columns.names[place], cached.hashes[blocks - 1])

    def cached(self, place: int) -> Cached | None:
        """Return the cached part of the prompt under an instance's identity; None if it can't be named so."""
        return self._lookups.under(self._identities[place])


class Candidates:
    """Owns the tables. A request costs O(instances) in C, and O(1) for each that changed or holds some of the
    prompt.
    """

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        *,
        index: FleetIndex,
        load: LoadTracker,
        recent: RecentRoutes,
        homes: RecentRoutes,
        learned: LearnedAffinity,
        calibration: Calibration,
        clock: Callable[[], float],
    ) -> None:
        self._index = index
        self._load = load
        self._recent = recent
        self._homes = homes
        self._learned = learned
        self._calibration = calibration
        self._clock = clock
        self._lives: dict[InstanceId, int] = {}
        self._identities: dict[CacheIdentity, CacheIdentity] = {}
        self._reloads: dict[InstanceId, tuple[InstanceStats, _Reload]] = {}
        self._ups: dict[InstanceId, _Reload] = {}  # of those that publish: the last that each had
        self._reload_times: dict[tuple[tuple[CacheTier, float], ...], _Reload] = {}
        self._tables: dict[tuple[InstanceId, int], CandidateTable] = {}

    def lookups(self, fingerprint: Fingerprint | Gap) -> Lookups:
        """Return the look-up of a prompt's residency; valid until the index changes."""
        return Lookups(fingerprint, self._index, recent=self._recent, homes=self._homes, now_s=self._clock())

    def of(self, instances: Sequence[Instance], lookups: Lookups) -> PromptField:
        """Return instances, at least one, as candidates for a prompt, in their order; valid until anything changes."""
        columns = self._table_of(instances)
        held: dict[int, Held] = {}
        for identity, places in columns.kinds:
            cached = lookups.under(identity)
            if cached is not None:
                for names, tokens in cached.groups:
                    at = places.get(names)
                    held |= dict.fromkeys(columns.find(names, identity, places) if at is None else at, tokens)
                for name, tokens in cached.apart.items():
                    for place in columns.find((name,), identity, places):
                        held[place] = tokens
        return PromptField(columns, held, lookups, self._index)

    def speeds(self, instance: Instance) -> Speeds | None:
        """Return how fast an instance is; None before anything is known."""
        measured, stats = self._calibration.speeds(instance.id), instance.stats
        if measured is None or stats is None:
            return measured
        return self._reload(instance.id, stats).with_times(measured)

    def observed(self, instance: InstanceId) -> None:
        """An instance's speeds have changed by an answer of its own."""
        for columns in self._tables.values():
            at = columns.places.get(instance)
            if at is not None:
                columns.set_speeds(at, self.speeds(columns.instances[at]))

    def forget(self, instance: InstanceId) -> None:
        """An instance is gone. All tables are made anew, which is as seldom."""
        self._tables.clear()
        self._reloads.pop(instance, None)
        self._ups.pop(instance, None)
        self._lives.pop(instance, None)

    def _table_of(self, instances: Sequence[Instance]) -> CandidateTable:
        """Return the columns of these, brought up to date. They are kept by who is first in them and how many they are:
        a model's, and those without the one or other whose breaker is open.
        """
        key = (instances[0].id, len(instances))
        columns = self._tables.get(key)
        if columns is None or columns.source is not instances:
            others = () if columns is None else list(compress(count(), map(is_not, columns.instances, instances)))
            if columns is None or any(instances[at].id != columns.names[at] for at in others):
                if len(self._tables) >= _MOST_TABLES:
                    self._tables.clear()
                columns = self._tables[key] = CandidateTable(instances, self._load)
                for each in instances:
                    self._seat(columns, each)
            else:
                for at in others:
                    self._seat(columns, instances[at])
            columns.source = instances if isinstance(instances, tuple) else None
        columns.refresh()
        if columns.version != self._calibration.version:
            self._set_all_speeds(columns)
        return columns

    def _seat(self, columns: CandidateTable, instance: Instance) -> None:
        """Show an instance's new snapshot."""
        stats = instance.stats
        if stats is None and self._lives.get(instance.id) != instance.life:
            self._learned.forget(instance.id)  # it was away: whoever is there now may have an empty cache
            self._lives[instance.id] = instance.life
        if stats is None:
            identity = None
            self._ups.pop(instance.id, None)
        else:
            identity = self._interned(stats.identity)
            self._ups[instance.id] = self._reload(instance.id, stats)
        columns.seat(instance, identity, self.speeds(instance))

    def _set_all_speeds(self, columns: CandidateTable) -> None:
        """All get the new speeds together."""
        fleet = self._calibration.fleet
        paces: tuple[Speeds | None, ...] = (fleet,)
        merged: list[Speeds | None] = [fleet] * len(columns.names)
        if fleet is not None:
            reloads = list(map(self._ups.get, columns.names))
            first = reloads[0]
            if first is not None and all(map(is_, reloads, repeat(first))):
                paces = (first.with_times(fleet),)
                merged = [paces[0]] * len(reloads)
            else:
                paces = ()
                merged = [fleet if each is None else each.with_times(fleet) for each in reloads]
        for name in self._calibration.unlike:
            at = columns.places.get(name)
            if at is not None:
                merged[at] = self.speeds(columns.instances[at])
                paces = ()
        columns.set_all_speeds(merged, self._calibration.version, paces)

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
