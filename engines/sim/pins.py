"""Pinned blocks of a simulated engine's pool, which holds them as it holds a request's.

What comes before a pinned block is held with it, as nothing may go that something follows on; where there is no room
for both, neither is held.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from engines.control.pin_book import PinBook, PinRules, TakenOut
from engines.control.pin_ledger import PinLedger
from engines.sim.engine import SimEngine
from engines.sim.pool import PrefixPool
from kvcontrol.core.ids import BlockHash
from kvcontrol.core.integrity import must
from kvcontrol.core.prefix_control import Pins

PIN_SHARE: Final = 0.25
"""The share of each tier that may be pinned, as in an LMDeploy instance without a setting."""


class PoolMemory:
    """A pool's blocks as pins hold them: see ``PinnedMemory``. ``wanted`` are the blocks that pins have."""

    def __init__(
        self,
        pool: PrefixPool,
        wanted: Mapping[BlockHash, int],
        *,
        block_tokens: int,
        most_blocks: Callable[[], int],
    ) -> None:
        self.block_tokens = block_tokens
        self._pool = pool
        self._wanted = wanted
        self._most_blocks = most_blocks
        self._held: set[BlockHash] = set()
        """Blocks that are held: pinned ones, and what comes before them."""
        self._doomed: set[BlockHash] = set()
        """Blocks that are to be forgotten, with all that follows them, as soon as nobody uses them."""
        self._followed: set[BlockHash] = set()
        """All that was ever seen to follow them."""
        pool.witness = self._stored

    @property
    def capacity_blocks(self) -> int:
        return self._pool.capacity_blocks

    def check(self) -> None:
        """Any pool's blocks can be pinned."""

    def holds(self, key: BlockHash) -> bool:
        return key in self._held

    def above(self, key: BlockHash) -> Sequence[BlockHash] | None:
        return self._pool.cached.path_to(key)[:-1] or None

    def following(self, keys: Collection[BlockHash]) -> set[BlockHash]:
        return set(self._pool.cached.with_what_follows(keys))

    def hold(self, keys: Collection[BlockHash]) -> None:
        """All pinned blocks are looked for: one may have room now because of another. O(pinned, and before them)."""
        del keys
        self._hold(self._to_hold())

    def release(self, keys: Collection[BlockHash]) -> None:
        """See ``hold``."""
        self.hold(keys)

    def release_all(self) -> None:
        self._hold(set())

    def reset(self) -> int:
        return self._pool.reset()

    def take_out(self, keys: Collection[BlockHash]) -> TakenOut:
        pool = self._pool
        here = pool.cached.with_what_follows(keys)
        blocks = pool.drop(here)
        self._doomed.update(key for key in keys if key in pool.cached)
        return TakenOut(blocks, sum(key in pool.cached for key in here))

    @property
    def has_doomed(self) -> bool:
        return bool(self._doomed)

    def pardon(self, keys: Collection[BlockHash] | None) -> None:
        self._doomed.difference_update(self._doomed.copy() if keys is None else keys)

    def forget_doomed(self) -> set[BlockHash]:
        pool = self._pool
        here = pool.cached.with_what_follows(self._doomed)
        self._followed.update(self._doomed, here)
        pool.drop(here)
        left = {key for key in self._doomed if key in pool.cached}
        gone = set() if left == self._doomed else set(self._followed)
        self._doomed = left
        if not left:
            self._followed = set()
        return gone

    def check_integrity(self, wanted: Collection[BlockHash]) -> None:
        must(set(wanted) == self._wanted.keys(), "other blocks are pinned than the pool knows of")
        must(self._held == self._to_hold(), "not the pinned blocks of HBM are held")

    def _stored(self, keys: Collection[BlockHash]) -> None:
        """Follow blocks that HBM has from now on."""
        if self._wanted and not self._wanted.keys().isdisjoint(keys):
            self.hold(keys)

    def _hold(self, keys: set[BlockHash]) -> None:
        held = self._held
        self._pool.keep(list(keys - held))
        self._pool.release(list(held - keys))
        self._held = keys

    def _to_hold(self) -> set[BlockHash]:
        """Return the pinned blocks of HBM and what comes before them, as far as that is not too much."""
        found: set[BlockHash] = set()
        most = self._most_blocks()
        for key in self._wanted:
            path = self._pool.cached.path_to(key, until=found)
            if len(found) + len(path) <= most:
                found.update(path)
        return found


class SimPins(PinBook):
    """The pins of one simulated engine; its thread's, ``report`` too."""

    def __init__(self, engine: SimEngine, *, clock: Callable[[], float] = time.monotonic) -> None:
        shape, tiers, ledger = engine.profile.engine, engine.tiers, PinLedger()
        super().__init__(
            PoolMemory(
                engine.pool,
                ledger.wanted,
                block_tokens=shape.block_tokens,
                most_blocks=lambda: self.limit().blocks,
            ),
            ledger,
            PinRules(
                share=PIN_SHARE,
                setting="",
                longest_blocks=min(shape.hbm_blocks, -(-shape.context_tokens // shape.block_tokens)),
                option="--context-tokens",
            ),
            hierarchy=lambda: None if tiers is None else tiers.hierarchy,
            forget_below=lambda keys: {} if tiers is None else tiers.forget(keys),
            clock=clock,
        )
        if tiers is not None:
            tiers.witness = self.changed_below

    def report(self) -> Pins:
        """Return all pins whose time is not over, and where their blocks are."""
        self.work()
        return super().report()
