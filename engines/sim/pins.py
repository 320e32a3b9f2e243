"""Prefixes that stay, in a simulated engine: in its pool by a hold as a request's, and in the tiers below by one there.

As in an LMDeploy instance (``lmdeploy/trie/pins.py``), a pin is a standing order: a block that isn't there is held from
the moment that it is. Pins have at most a share of each tier, and leave room in HBM for the longest request. What comes
before a pinned block is held with it, as nothing may go that something follows on; where there is no room for both,
neither is held.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final

from engines.control.pin_ledger import HeldBelow, Limit, PinLedger, counted, limit_of
from engines.sim.engine import SimEngine
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockHash
from kvcontrol.core.integrity import must
from kvcontrol.core.prefix_control import Invalidation, Pins
from kvcontrol.kv_runtime import HierarchyManager

PIN_SHARE: Final = 0.25
"""The share of each tier that may be pinned, as in an LMDeploy instance that isn't told otherwise."""
_WORK_EVERY_S: Final = 0.25
_HBM = CacheTier.HBM


class SimPins:
    """The pins of one engine; its thread's."""

    def __init__(self, engine: SimEngine, *, clock: Callable[[], float] = time.monotonic) -> None:
        shape = engine.profile.engine
        self._engine = engine
        self._pool = engine.pool
        self._block_tokens = shape.block_tokens
        self._longest_blocks = min(shape.hbm_blocks, -(-shape.context_tokens // shape.block_tokens))
        self._clock = clock
        self._ledger = PinLedger()
        self._below = HeldBelow(self._hierarchy, self._ledger.wanted)
        self._in_hbm: set[BlockHash] = set()
        """Blocks of HBM that are held: pinned ones, and what comes before them."""
        self._doomed: set[BlockHash] = set()
        """Blocks that are to be forgotten, with all that follows them, as soon as nobody uses them."""
        self._followed: set[BlockHash] = set()
        """All that was ever seen to follow them."""
        self._timer: asyncio.TimerHandle | None = None
        engine.pool.witness = self._stored
        if engine.tiers is not None:
            engine.tiers.witness = self._below.follow

    def pin(self, keys: Sequence[BlockHash], ttl_s: float | None) -> None:
        """Pin a prefix, what is above it here included; raises ``RefusedError`` where that would be too much."""
        self.work()
        until_s = None if ttl_s is None else self._clock() + ttl_s
        if self._ledger.renew(keys, until_s):
            return
        above = self._pool.path_to(keys[0])[:-1] or self._below.above(keys[0])
        path = tuple(dict.fromkeys((*above, *keys)))
        off = self._ledger.add(path, until_s, self.limit())
        self._doomed.difference_update(path)
        self._let_off(off)
        self._below.hold(path)

    def unpin(self, tip: BlockHash) -> bool:
        """End the pin that is called so, and return whether there was one."""
        self.work()
        if tip not in self._ledger.pins:
            return False
        self._let_off(self._ledger.end(tip))
        return True

    def invalidate(self, keys: Sequence[BlockHash]) -> Invalidation:
        """Forget blocks and all that follow them, in all tiers; see ``Invalidation``."""
        self.work()
        pool = self._pool
        here = pool.with_what_follows(keys)
        known = {*keys, *here}
        affected = known | self._below.following(known)
        unpinned = self._ledger.having(affected)
        for tip in unpinned:
            self._let_off(self._ledger.end(tip))
        dropped = {_HBM: pool.drop(here)} | self._forget_below(affected)
        self._doomed.update(key for key in keys if key in pool)
        in_use = sum(key in pool for key in here)
        return Invalidation(dropped=dropped, in_use_blocks=in_use, unpinned=[tip.hex() for tip in unpinned])

    def reset(self) -> dict[CacheTier, int]:
        """Forget all that no request uses, pinned or not; the pins stand, for when it is computed again."""
        self._hold_in_hbm(set())
        self._below.release(list(self._below.held))
        dropped = {_HBM: self._pool.reset()} | self._forget_below(None)
        self._settle()
        self._below.hold(self._ledger.wanted)
        return dropped

    def report(self) -> Pins:
        """Return all pins and where their blocks are."""
        self.work()
        return self._ledger.report(
            self._places, now_s=self._clock(), block_tokens=self._block_tokens, limit=self.limit(), errors=0
        )

    def counts(self) -> dict[CacheTier, int]:
        """Return how many blocks of each tier are pinned."""
        return dict.fromkeys(self._tiers(), 0) | counted(map(self._places, self._ledger.wanted))

    def limit(self) -> Limit:
        """Return how much may be pinned."""
        return limit_of(
            self._tiers(),
            share=PIN_SHARE,
            setting="",
            longest_blocks=self._longest_blocks,
            option="--context-tokens",
        )

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Work now and then from now on, until ``close``."""
        self.close()
        self.work()
        self._timer = loop.call_later(_WORK_EVERY_S, self.follow, loop)

    def close(self) -> None:
        """Work no more."""
        if self._timer is not None:
            self._timer.cancel()

    def work(self) -> None:
        """End pins whose time is over, and forget what was to be forgotten and is free now."""
        for tip in self._ledger.over(self._clock()):
            self._let_off(self._ledger.end(tip))
        if self._doomed:
            self._forget_doomed()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when pins and what they hold contradict each other. O(blocks)."""
        self._ledger.check_integrity()
        wanted = self._ledger.wanted.keys()
        must(self._in_hbm == self._wanted_in_hbm(), "not the pinned blocks of HBM are held")
        must(self._below.held.keys() <= wanted, "a block is held below HBM that no pin has")

    # Inside.

    def _hierarchy(self) -> HierarchyManager | None:
        tiers = self._engine.tiers
        return None if tiers is None else tiers.hierarchy

    def _tiers(self) -> dict[CacheTier, int]:
        hierarchy = self._hierarchy()
        below = {} if hierarchy is None else hierarchy.stats().tiers
        return {_HBM: self._pool.capacity_blocks} | {tier: stats.capacity_blocks for tier, stats in below.items()}

    def _places(self, key: BlockHash) -> tuple[CacheTier, ...]:
        below = self._below.places(key)
        return (_HBM, *below) if key in self._in_hbm else below

    def _stored(self, keys: Collection[BlockHash]) -> None:
        """Follow blocks that HBM has from now on."""
        wanted = self._ledger.wanted
        if wanted and not wanted.keys().isdisjoint(keys):
            self._settle()

    def _let_off(self, keys: Collection[BlockHash]) -> None:
        self._settle()
        self._below.release(keys)

    def _settle(self) -> None:
        """Hold in HBM what is to be held, and nothing else. O(pinned blocks, and what comes before them)."""
        self._hold_in_hbm(self._wanted_in_hbm())

    def _hold_in_hbm(self, keys: set[BlockHash]) -> None:
        held = self._in_hbm
        self._pool.keep(list(keys - held))
        self._pool.release(list(held - keys))
        self._in_hbm = keys

    def _wanted_in_hbm(self) -> set[BlockHash]:
        """Return the pinned blocks of HBM and what comes before them, as far as that is not too much."""
        found: set[BlockHash] = set()
        most = self.limit().blocks
        for key in self._ledger.wanted:
            path = self._pool.path_to(key, until=found)
            if len(found) + len(path) <= most:
                found.update(path)
        return found

    def _forget_below(self, keys: Collection[BlockHash] | None) -> dict[CacheTier, int]:
        tiers = self._engine.tiers
        return {} if tiers is None else tiers.forget(keys)

    def _forget_doomed(self) -> None:
        """What requests saved at their end goes with what they used."""
        pool = self._pool
        here = pool.with_what_follows(self._doomed)
        self._followed.update(self._doomed, here)
        pool.drop(here)
        left = {key for key in self._doomed if key in pool}
        if left != self._doomed:
            self._forget_below(self._followed | self._below.following(self._followed))
        self._doomed = left
        if not left:
            self._followed = set()


__all__ = ["PIN_SHARE", "SimPins"]
