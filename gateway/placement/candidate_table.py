"""Load of the usable instances, in columns that are kept between requests.

What has changed since the last request is read in the load tracker's log. What an instance was given lately grows old
with every moment; so the column says what that would have been at one moment, and one number for all what it counts for
now.
"""

from collections.abc import Sequence
from typing import Final

from gateway.registry import Instance, LoadTracker, Tally, faded
from gateway.routing import NOTHING_HELD, Candidate, CandidateColumns, Held, Speeds, make_candidate
from gateway.routing.base import CHUNK_TOKENS
from kvcontrol.core.blocks import CacheIdentity
from kvcontrol.core.ids import InstanceId

_SINCE_AT_MOST_S: Final = 600.0
"""Then work is said as of another moment: the numbers double every half-life that has passed since."""
_AGES_S: Final = 0.2
"""After this long the work that was given lately counts for half a percent less."""
_NO_REQUEST: Final = -1
_MOST_PLACES: Final = 4096

_Places = dict[tuple[InstanceId, ...], tuple[int, ...]]
"""Of those among some names who are meant."""


class CandidateTable(CandidateColumns):
    """The columns of a list of instances.

    ``source`` is the tuple of the last request for them, None if it was no tuple. ``identities`` are those of the
    instances' caches, one object for equal ones. ``kinds`` are the different identities, each with the places of its
    instances for the sets of names that were looked up. ``version`` is that of the calibration behind the speeds.
    """

    __slots__ = (
        "_counted",
        "_kinds",
        "_last_requests",
        "_load",
        "_load_epoch",
        "_read",
        "_seats",
        "_seats_s",
        "_since_s",
        "_stale",
        "_tallies",
        "identities",
        "instances",
        "source",
        "version",
    )

    def __init__(self, instances: Sequence[Instance], load: LoadTracker) -> None:
        super().__init__([each.id for each in instances])
        self.instances = list(instances)
        self.source: tuple[Instance, ...] | None = None
        self.identities: list[CacheIdentity | None] = [None] * len(instances)
        self._kinds: list[tuple[CacheIdentity | None, _Places]] = []  # none until somebody asks
        self.version = 0
        self._load = load
        self._last_requests = [_NO_REQUEST] * len(instances)  # the last of each whose work is in ``recent``
        self._counted = [0] * len(instances)  # the last request of each that has a turn
        self._tallies: list[Tally] = [load.tally(each.id) for each in instances]
        self._load_epoch = load.epoch
        self._read = len(load.changed)
        self._stale: set[int] = set()  # places to be filled, whatever the log says
        self._since_s = load.now_s()
        self._seats: list[Candidate | None] = [None] * len(instances)
        self._seats_s = self._since_s

    def seat(self, instance: Instance, identity: CacheIdentity | None, speeds: Speeds | None) -> None:
        """Show an instance's new snapshot."""
        at = self.places[instance.id]
        self.instances[at] = instance
        if identity is not self.identities[at]:
            self.identities[at] = identity
            self._kinds = []
        if speeds is not self.speeds[at]:
            self.speeds[at] = speeds
            self.paces = ()
        self.slots[at] = 0 if instance.stats is None else instance.stats.load.max_batch_size
        self._tallies[at] = self._load.tally(instance.id)
        self._last_requests[at] = _NO_REQUEST
        self._stale.add(at)

    @property
    def kinds(self) -> Sequence[tuple[CacheIdentity | None, _Places]]:
        if not self._kinds:
            different = dict(zip(map(id, self.identities), self.identities, strict=True))
            self._kinds = [(each, {}) for each in different.values()]
        return self._kinds

    def find(self, names: tuple[InstanceId, ...], identity: CacheIdentity | None, known: _Places) -> tuple[int, ...]:
        """Return the places of those among some names that are here and whose caches have an identity; ``known`` is
        what ``kinds`` has for it.
        """
        places = known.get(names)
        if places is None:
            if len(known) >= _MOST_PLACES:
                known.clear()
            here = [at for name in names if (at := self.places.get(name)) is not None]
            places = known[names] = tuple([at for at in here if self.identities[at] is identity])
        return places

    def set_speeds(self, at: int, speeds: Speeds | None) -> None:
        """One has other speeds from now on."""
        if speeds is not self.speeds[at]:
            self.speeds[at] = speeds
            self.paces = ()
            self._seats[at] = None
            self.note([at])

    def set_all_speeds(self, speeds: list[Speeds | None], version: int, paces: tuple[Speeds | None, ...] = ()) -> None:
        """All have other speeds from now on; ``paces`` are the different ones, where that is known."""
        self.speeds = speeds
        self.paces = paces
        self.version = version
        self._seats = [None] * len(speeds)
        self.note_all()

    def refresh(self) -> None:
        """Take in what has changed, and that time has passed."""
        load, stale = self._load, self._stale
        now_s = load.now_s()
        since_s = now_s - self._since_s
        if since_s > _SINCE_AT_MOST_S:
            self._since_s = now_s
            since_s = 0.0
            stale.update(range(len(self.names)))
            self._last_requests = [_NO_REQUEST] * len(self.names)
        self.scale = faded(since_s)
        changed = load.changed
        if self._load_epoch != load.epoch:
            self._load_epoch = load.epoch
            stale.update(range(len(self.names)))
        elif self._read < len(changed):
            stale.update([at for at in map(self.places.get, changed[self._read :]) if at is not None])
        self._read = len(changed)
        if stale:
            self._fill(stale)
            stale.clear()
        if now_s - self._seats_s > _AGES_S:
            self._seats = [None] * len(self._seats)
            self._seats_s = now_s

    def _fill(self, places: set[int]) -> None:
        recent, least, since_s = self.recent, self.least, self._since_s
        running, queued, soon, seats = self.running, self.queued, self.soon, self._seats
        tallies, last_requests, instances = self._tallies, self._last_requests, self.instances
        is_known = True
        for at in places:
            tally = tallies[at]
            running[at] = tally.in_flight + instances[at].foreign_requests
            tokens = tally.prefill_tokens
            queued[at] = tokens
            if (long := tally.chunked_tokens) > CHUNK_TOKENS and instances[at].stats is not None:
                tokens -= long - CHUNK_TOKENS  # it is LMDeploy's way
            soon[at] = tokens
            seats[at] = None
            if last_requests[at] == tally.last_request:
                continue  # it got nothing since
            last_requests[at] = tally.last_request
            if self._counted[at] != tally.last_request:
                self._counted[at] = tally.last_request
                self.turns += 1
                self.last_turns[at] = self.turns
            self.last_cold_requests[at] = tally.last_cold_request
            work = tally.recent_tokens
            now = work * faded(since_s - tally.recent_at_s) if work else 0.0
            if recent[at] == least < now:
                is_known = False
            recent[at] = now
            least = min(now, least)
        self.least = least if is_known else min(recent)
        self.note(places)

    def candidate(self, place: int, held: Held) -> Candidate:
        tally, foreign = self._tallies[place], self.instances[place].foreign_requests
        return make_candidate(
            (
                self.names[place],
                *held,
                self.running[place] - foreign,
                self.queued[place],
                foreign,
                self.slots[place],
                self.recent[place] * self.scale,
                tally.last_request,
                self.last_cold_requests[place],
                self.speeds[place],
                self.queued[place] - self.soon[place],
            )
        )

    def seats(self) -> Sequence[Candidate]:
        found = self._seats
        for at, seat in enumerate(found):
            if seat is None:
                found[at] = self.candidate(at, NOTHING_HELD)
        return found  # type: ignore[return-value] # none is None any more
