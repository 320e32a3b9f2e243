"""Residency of one prompt, looked up once for each cache identity."""

from collections.abc import Sequence

from gateway.fingerprint import Fingerprint, Gap
from gateway.routing import NOTHING_HELD, Held, RecentRoutes, learned_identity, sent_identity
from kvcontrol.core.blocks import CacheIdentity
from kvcontrol.core.ids import BlockHash, InstanceId
from kvcontrol.prefix_reuse import FleetIndex, Run


class Cached:
    """What is cached of a prompt under one identity, in blocks of so many tokens, and where. ``groups`` are those that
    hold as much of it, as the index has it; ``apart`` says it of those who were sent what follows lately, and goes
    before.
    """

    __slots__ = ("apart", "block_tokens", "groups", "hashes")

    def __init__(
        self, hashes: Sequence[BlockHash], runs: Sequence[Run], block_tokens: int, *, recent: RecentRoutes, now_s: float
    ) -> None:
        self.hashes = hashes
        self.block_tokens = block_tokens
        self.groups: list[tuple[tuple[InstanceId, ...], Held]] = []
        self.apart: dict[InstanceId, Held] = {}
        first = recent.place(hashes[0], now_s) if hashes else None
        stop, head = 0, None
        for blocks, by_tier, names in runs:
            tokens = blocks * block_tokens
            tiers = {tier: count * block_tokens for tier, count in by_tier.items()}
            self.groups.append((names, (tokens, tiers, tokens)))
            if blocks != stop:
                stop = blocks
                head = recent.place(hashes[blocks], now_s) if blocks < len(hashes) else None
            if head is not None and head in names:
                sent = recent.expected(hashes, head, now_s, start=blocks) * block_tokens
                self.apart[head] = (tokens, tiers, tokens + sent)
            if first is not None and first in names:
                first = None
        if first is not None:
            self.apart[first] = (
                0,
                NOTHING_HELD[1],
                recent.expected(hashes, first, now_s) * block_tokens,
            )

    def expect(self, home: InstanceId, blocks: int) -> None:
        """Expect so many blocks of the prompt where it was sent before."""
        tokens, tiers, expected = next((held for names, held in self.groups if home in names), NOTHING_HELD)
        self.apart[home] = (tokens, tiers, max(expected, blocks * self.block_tokens))


class Lookups:
    """A prompt's look-ups, one for each cache identity that instances have."""

    __slots__ = ("_fingerprint", "_found", "_homes", "_index", "_now_s", "_recent")

    def __init__(
        self,
        fingerprint: Fingerprint | Gap,
        index: FleetIndex,
        *,
        recent: RecentRoutes,
        homes: RecentRoutes,
        now_s: float,
    ) -> None:
        self._fingerprint = fingerprint
        self._index = index
        self._recent = recent
        self._homes = homes
        self._now_s = now_s
        self._found: dict[int, Cached] = {}  # by the identity's, of which there is one object for equal ones

    @property
    def any(self) -> bool:
        """Whether the prompt could be looked up under any identity."""
        return bool(self._found)

    def under(self, identity: CacheIdentity | None) -> Cached | None:
        """Return what is cached under an identity (None: of an instance that publishes nothing), None where the prompt
        can't be named so.
        """
        return self._found.get(id(identity)) or self._look_up(identity)

    def _look_up(self, identity: CacheIdentity | None) -> Cached | None:
        fingerprint = self._fingerprint
        if isinstance(fingerprint, Gap):
            return None
        if fingerprint.textual and identity is not None:
            named = sent_identity(fingerprint.model)
        else:
            named = identity or learned_identity(fingerprint.model, textual=fingerprint.textual)
        hashes = fingerprint.hashes(named)
        found = self._found[id(identity)] = Cached(
            hashes, self._index.runs(hashes), named.block_size_tokens, recent=self._recent, now_s=self._now_s
        )
        if identity is not None and fingerprint.gap is not None:  # no event will ever confirm what was sent
            home = self._homes.deepest(hashes, self._now_s)
            if home is not None:
                found.expect(*home)
        return found
