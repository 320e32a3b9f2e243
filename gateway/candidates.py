"""The usable instances as a policy sees them: what each has to do, how fast it is, what it holds of a prompt.

Made for each request, over all instances, so little of it is made anew. Of an instance that holds nothing of the prompt
everything is known beforehand; its candidate is kept, in a *seat*, until one of the things changes that it says:

    the instance's snapshot  a health check brought another one
    its tally                a request came or went, or the work it was given lately has lost a half percent by age
    its speeds               an answer of its own was observed, or the calibration has a new ``version`` for all

``NaiveCandidates`` in the tests keeps nothing and is what this is compared with.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gateway.fingerprint import Fingerprint, Gap
from gateway.registry import Instance, LoadTracker, Tally
from gateway.routing import Calibration, Candidate, LearnedAffinity, RecentRoutes, Speeds, learned_identity
from kvcontrol.core.blocks import CacheIdentity, CacheTier
from kvcontrol.core.control import InstanceStats
from kvcontrol.core.ids import BlockHash, InstanceId
from kvcontrol.prefix_reuse import FleetIndex, PrefixMatch

_ASSUMED_BYTES_PER_S = {CacheTier.DDR: 8e9, CacheTier.NVME: 1e9, CacheTier.REMOTE: 0.5e9}
_PATHS_UP = {
    CacheTier.DDR: ("ddr_to_hbm",),
    CacheTier.NVME: ("nvme_to_ddr", "ddr_to_hbm"),
}
_AGES_S: Final = 0.2
"""After this long the work that an instance was given lately counts for half a percent less."""
_NEVER: Final = float("inf")
_MOST_IDENTITIES: Final = 1024
_NOBODYS: Final = CacheIdentity(model="-", revision="-", kv_dtype="-", block_size_tokens=1)


class Cached:
    """What is cached of a prompt under one identity, in blocks of so many tokens, and where."""

    __slots__ = ("_get", "_heads", "_held", "_now_s", "_recent", "block_tokens", "by_instance", "concerned", "hashes")

    def __init__(
        self,
        hashes: Sequence[BlockHash],
        by_instance: Mapping[InstanceId, PrefixMatch],
        block_tokens: int,
        *,
        recent: RecentRoutes,
        now_s: float,
    ) -> None:
        self.hashes = hashes
        self.by_instance = by_instance
        self.block_tokens = block_tokens
        self._get = by_instance.get
        self._recent = recent
        self._now_s = now_s
        self._heads: dict[int, InstanceId | None] = {}
        self._held: dict[int, tuple[int, Mapping[CacheTier, int]]] = {}
        first = self._heads[0] = self._head(0)
        self.concerned = {*by_instance, first}
        """Instances that hold something of the prompt, or were sent its beginning lately; None may be among them."""

    def held(self, instance: InstanceId) -> int:
        """Return how many leading blocks an instance holds."""
        match = self._get(instance)
        return 0 if match is None else match.blocks

    def seen_by(self, candidate: Candidate) -> Candidate:
        """Return a candidate that holds nothing as one that holds what it does, and what was sent there lately.

        Mostly the block after those that it holds was sent elsewhere, or nowhere: asked once for all who hold as many.
        """
        instance = candidate[0]
        match = self._get(instance)
        blocks = 0 if match is None else match.blocks
        try:
            head = self._heads[blocks]
        except KeyError:
            head = self._heads[blocks] = self._head(blocks)
        expected = blocks
        if head == instance:
            expected += self._recent.expected(self.hashes, instance, self._now_s, start=blocks)
        if match is not None:
            held = self._held.get(id(match))  # matches are shared, and live as long as this
            if held is None:
                size = self.block_tokens
                held = self._held[id(match)] = (blocks * size, {tier: n * size for tier, n in match.by_tier.items()})
            return Candidate._make((instance, *held, expected * self.block_tokens, *candidate[4:]))
        if expected:
            return candidate._replace(expected_tokens=expected * self.block_tokens)
        return candidate

    def _head(self, blocks: int) -> InstanceId | None:
        return self._recent.place(self.hashes[blocks], self._now_s) if blocks < len(self.hashes) else None


class Lookups:
    """A prompt's look-ups, one for each cache identity that instances have."""

    def __init__(self, fingerprint: Fingerprint | Gap, index: FleetIndex, recent: RecentRoutes, now_s: float) -> None:
        self._fingerprint = fingerprint
        self._index = index
        self._recent = recent
        self._now_s = now_s
        self._found: dict[CacheIdentity, Cached] = {}
        self._last: tuple[CacheIdentity | None, Cached | None] = (None, None)
        self._learned: Cached | None = None

    @property
    def any(self) -> bool:
        """Whether the prompt could be looked up under any identity."""
        return bool(self._found)

    def under(self, identity: CacheIdentity | None) -> Cached | None:
        """Return what is cached under an identity (None: of an instance that publishes nothing), None where the prompt
        can't be named so.
        """
        if identity is None:
            return self._learned or self._look_up_learned()
        if identity is self._last[0]:
            return self._last[1]
        fingerprint = self._fingerprint
        if isinstance(fingerprint, Gap) or fingerprint.textual:
            return None
        found = self._found.get(identity) or self._look_up(fingerprint, identity)
        self._last = (identity, found)
        return found

    def _look_up_learned(self) -> Cached | None:
        fingerprint = self._fingerprint
        if isinstance(fingerprint, Gap):
            return None
        self._learned = self._look_up(fingerprint, learned_identity(fingerprint.model, textual=fingerprint.textual))
        return self._learned

    def _look_up(self, fingerprint: Fingerprint, identity: CacheIdentity) -> Cached:
        hashes = fingerprint.hashes(identity)
        found = self._found[identity] = Cached(
            hashes, self._index.match(hashes), identity.block_size_tokens, recent=self._recent, now_s=self._now_s
        )
        return found


@dataclass(slots=True, kw_only=True)
class _Seat:
    """An instance's candidate for a prompt that it holds nothing of, and what that was made from."""

    instance: Instance
    tally: Tally
    changes: int
    version: int
    until_s: float
    identity: CacheIdentity | None
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class _Known:
    """An instance's speeds, and what they were worked out from."""

    stats: InstanceStats
    measured: Speeds
    speeds: Speeds


class Candidates:
    """Owns the seats. O(instances + instances that hold some of the prompt) for each request."""

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
        self._seats: dict[InstanceId, _Seat] = {}
        self._speeds: dict[InstanceId, _Known] = {}
        self._lives: dict[InstanceId, int] = {}
        self._identities: dict[CacheIdentity, CacheIdentity] = {}

    def lookups(self, fingerprint: Fingerprint | Gap) -> Lookups:
        """Return what will say who holds what of a prompt; valid until the index changes."""
        return Lookups(fingerprint, self._index, self._recent, self._clock())

    def of(self, instances: Sequence[Instance], lookups: Lookups) -> tuple[Candidate, ...]:
        """Return each instance as a candidate for a prompt, in their order."""
        now_s = self._clock()
        version = self._calibration.version
        seats = self._seats
        found: list[Candidate] = []
        identity: CacheIdentity | None = _NOBODYS
        cached: Cached | None = None
        for each in instances:
            name = each.id
            seat = seats.get(name)
            if (
                seat is None
                or seat.instance is not each
                or seat.changes != seat.tally.changes
                or seat.version != version
                or seat.until_s <= now_s
            ):
                seat = self._seated(each, now_s)
            if seat.identity is not identity:
                identity = seat.identity
                cached = lookups.under(identity)
            if cached is None or name not in cached.concerned:
                found.append(seat.candidate)
            else:
                found.append(cached.seen_by(seat.candidate))
        return tuple(found)

    def cached(self, instance: Instance, lookups: Lookups) -> Cached | None:
        """Return what is cached of a prompt under an instance's identity; None where it can't be named so."""
        if instance.stats is None:
            return lookups.under(None)
        seat = self._seats.get(instance.id)
        known = seat is not None and seat.instance is instance
        return lookups.under(seat.identity if seat is not None and known else self._interned(instance.stats.identity))

    def speeds(self, instance: Instance) -> Speeds | None:
        """Return how fast an instance is; None before anything is known."""
        measured = self._calibration.speeds(instance.id)
        if measured is None or instance.stats is None:
            return measured
        known = self._speeds.get(instance.id)
        if known is None or known.stats is not instance.stats or known.measured is not measured:
            speeds = replace(measured, reload_s_per_token=_reload_times(instance.stats))
            known = self._speeds[instance.id] = _Known(instance.stats, measured, speeds)
        return known.speeds

    def observed(self, instance: InstanceId) -> None:
        """An instance's speeds have changed by an answer of its own."""
        self._seats.pop(instance, None)

    def forget(self, instance: InstanceId) -> None:
        """An instance is gone."""
        self._seats.pop(instance, None)
        self._speeds.pop(instance, None)
        self._lives.pop(instance, None)

    def _seated(self, instance: Instance, now_s: float) -> _Seat:
        stats = instance.stats
        if stats is None and self._lives.get(instance.id) != instance.life:
            self._learned.forget(instance.id)  # it was away: whoever is there now may have an empty cache
            self._lives[instance.id] = instance.life
        tally = self._load.tally(instance.id)
        recent_tokens = self._load.recent_tokens(tally)
        seat = self._seats[instance.id] = _Seat(
            instance=instance,
            tally=tally,
            changes=tally.changes,
            version=self._calibration.version,
            until_s=now_s + _AGES_S if recent_tokens else _NEVER,
            identity=None if stats is None else self._interned(stats.identity),
            candidate=Candidate(
                instance=instance.id,
                in_flight=tally.in_flight,
                prefill_tokens=tally.prefill_tokens,
                foreign_requests=instance.foreign_requests,
                slots=0 if stats is None else stats.load.max_batch_size,
                recent_tokens=recent_tokens,
                last_turn=tally.last_turn,
                last_cold_turn=tally.last_cold_turn,
                speeds=self.speeds(instance),
            ),
        )
        return seat

    def _interned(self, identity: CacheIdentity) -> CacheIdentity:
        """One object for equal identities: to compare them costs nothing then."""
        if len(self._identities) > _MOST_IDENTITIES:
            self._identities.clear()
        return self._identities.setdefault(identity, identity)


def _reload_times(stats: InstanceStats) -> dict[CacheTier, float]:
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


__all__ = ["Cached", "Candidates", "Lookups"]
