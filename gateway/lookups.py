"""What is cached of one prompt, and where: looked up once for each identity of a cache that instances have."""

from collections.abc import Mapping, Sequence

from gateway.fingerprint import Fingerprint, Gap
from gateway.routing import NOTHING_HELD, Held, RecentRoutes, learned_identity
from kvcontrol.core.blocks import CacheIdentity
from kvcontrol.core.ids import BlockHash, InstanceId
from kvcontrol.prefix_reuse import FleetIndex, PrefixMatch


class Cached:
    """What is cached of a prompt under one identity, in blocks of so many tokens, and where. ``held_by`` says it of all
    who hold something of the prompt, or were sent its beginning lately.
    """

    __slots__ = ("_now_s", "_recent", "block_tokens", "hashes", "held_by")

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
        self.block_tokens = block_tokens
        self._recent = recent
        self._now_s = now_s
        first = self._head(0)
        self.held_by: dict[InstanceId, Held] = {}
        if by_instance:
            self._see(by_instance, {0: first})
        if first is not None and first not in self.held_by:
            self.held_by[first] = (0, NOTHING_HELD[1], self._sent(first, 0))

    def held(self, instance: InstanceId) -> int:
        """Return how many leading blocks an instance holds."""
        held = self.held_by.get(instance)
        return 0 if held is None else held[0] // self.block_tokens

    def _see(self, by_instance: Mapping[InstanceId, PrefixMatch], heads: dict[int, InstanceId | None]) -> None:
        """Mostly the block after those that somebody holds was sent elsewhere, or nowhere: then all who hold as much
        share what is said of them.
        """
        size, held_by = self.block_tokens, self.held_by
        last: PrefixMatch | None = None
        for name, match in by_instance.items():
            if match is not last:
                last, blocks = match, match.blocks
                tiers = {tier: count * size for tier, count in match.by_tier.items()}
                shared: Held = (blocks * size, tiers, blocks * size)
                if blocks not in heads:
                    heads[blocks] = self._head(blocks)
                head = heads[blocks]
            held_by[name] = (blocks * size, tiers, blocks * size + self._sent(name, blocks)) if head == name else shared

    def _sent(self, instance: InstanceId, blocks: int) -> int:
        """How many tokens after so many blocks were sent to an instance lately."""
        return self._recent.expected(self.hashes, instance, self._now_s, start=blocks) * self.block_tokens

    def _head(self, blocks: int) -> InstanceId | None:
        return self._recent.place(self.hashes[blocks], self._now_s) if blocks < len(self.hashes) else None


class Lookups:
    """A prompt's look-ups, one for each cache identity that instances have."""

    def __init__(self, fingerprint: Fingerprint | Gap, index: FleetIndex, recent: RecentRoutes, now_s: float) -> None:
        self._fingerprint = fingerprint
        self._index = index
        self._recent = recent
        self._now_s = now_s
        self._found: dict[int, Cached] = {}  # by the identity's, of which there is one object for equal ones
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
        found = self._found.get(id(identity)) or self._look_up(fingerprint, identity)
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
        found = self._found[id(identity)] = Cached(
            hashes, self._index.match(hashes), identity.block_size_tokens, recent=self._recent, now_s=self._now_s
        )
        return found


__all__ = ["Cached", "Lookups"]
