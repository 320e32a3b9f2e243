"""What is cached of one prompt, and where: looked up once for each identity of a cache that instances have."""

from collections.abc import Mapping, Sequence

from gateway.fingerprint import Fingerprint, Gap
from gateway.routing import Candidate, RecentRoutes, learned_identity
from kvcontrol.core.blocks import CacheIdentity, CacheTier
from kvcontrol.core.ids import BlockHash, InstanceId
from kvcontrol.prefix_reuse import FleetIndex, PrefixMatch


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
        self.concerned: tuple[InstanceId, ...] = (*by_instance,)
        """Instances that hold something of the prompt, or were sent its beginning lately."""
        if first is not None and by_instance.get(first) is None:
            self.concerned = (*self.concerned, first)

    def held(self, instance: InstanceId) -> int:
        """Return how many leading blocks an instance holds."""
        match = self._get(instance)
        return 0 if match is None else match.blocks

    def seen_by(self, candidate: Candidate, before: Candidate | None) -> Candidate:
        """Return a candidate that holds nothing as one that holds what it does, and what was sent there lately; that is
        ``before``, made from it for another prompt, where both hold as much.

        Mostly the block after those that it holds was sent elsewhere, or nowhere: asked once for all who hold as many.
        """
        instance = candidate[0]
        match = self._get(instance)
        blocks = 0 if match is None else match.blocks
        try:
            head = self._heads[blocks]
        except KeyError:
            head = self._heads[blocks] = self._head(blocks)
        expected = blocks * self.block_tokens
        if head == instance:
            expected += self._recent.expected(self.hashes, instance, self._now_s, start=blocks) * self.block_tokens
        if match is None:
            matched, tiers = 0, candidate[2]
        else:
            held = self._held.get(id(match))  # matches are shared, and live as long as this
            if held is None:
                size = self.block_tokens
                held = self._held[id(match)] = (blocks * size, {tier: n * size for tier, n in match.by_tier.items()})
            matched, tiers = held
        if before is not None and before[1] == matched and before[3] == expected and before[2] == tiers:
            return before
        return Candidate._make((instance, matched, tiers, expected, *candidate[4:]))

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


__all__ = ["Cached", "Lookups"]
