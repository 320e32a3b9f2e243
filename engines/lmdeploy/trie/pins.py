"""Prefixes that stay: in HBM, where the pins hold a reference to each block as a request would, and below by a hold.

Both are what eviction stops at already, LMDeploy's own and every policy's, and what a policy is told of when it takes
over; so nothing else has to know of pins. A pin is a standing order: a block that isn't there is held from the moment
that it is, whether it was computed, loaded or saved.

What is held takes room from requests for good. So pins together have at most a share of each tier, and in HBM they
leave room for the longest request that the instance takes: none waits for ever for blocks that never come free.

A block that is to be forgotten while a request uses it stays until that has ended (its save to the tiers included),
and is forgotten then; ``work`` looks after that, and after pins whose time is over.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from engines.control.errors import RefusedError
from engines.control.pin_ledger import HeldBelow, Limit, PinLedger, counted, limit_of
from engines.lmdeploy.guard import Guard
from engines.lmdeploy.trie.events import evict_unused, hash_of
from engines.lmdeploy.trie.prefixes import find_nodes, path_above, take_out, with_what_follows
from engines.lmdeploy.trie.watchers import tell_watchers
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockHash
from kvcontrol.core.integrity import must
from kvcontrol.core.prefix_control import Invalidation, Pins
from kvcontrol.kv_runtime import HierarchyManager
from kvcontrol.kv_runtime.ticket import Change

WORK_EVERY_S = 0.25
_HBM = CacheTier.HBM


class Below(Protocol):
    """What pins ask of the tiers below HBM."""

    @property
    def hierarchy(self) -> HierarchyManager | None:
        """The tiers, None before they were started."""

    def forget(self, keys: Collection[BlockHash] | None = None) -> dict[CacheTier, int]:
        """Drop blocks in all tiers, None for all, and return how many of each tier."""


class PinBook:
    """The pins of one engine; its thread's, but for ``report`` and ``counts``, which any may call.

    ``share`` is that of each tier which may be pinned, ``longest_tokens`` the longest request's. Nothing raises into
    the engine's loop.
    """

    def __init__(
        self,
        scheduler: Any,
        below: Below | None,
        *,
        share: float,
        longest_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._trie = scheduler.block_trie
        self._below = below
        self._share = share
        self._longest_blocks = -(-longest_tokens // self._trie.block_size)
        self._clock = clock
        self._guard = Guard("pins")
        self._ledger = PinLedger()
        self._wanted = self._ledger.wanted
        self._in_hbm: dict[BlockHash, Any] = {}
        """Nodes to whose blocks the pins have a reference."""
        self._held = HeldBelow(lambda: self._hierarchy, self._wanted)
        self._doomed: dict[Any, set[BlockHash]] = {}
        """Nodes that are to be forgotten as soon as nobody uses them, and all that was ever seen to follow them."""
        self._timer: asyncio.TimerHandle | None = None

    # What operators ask.

    def pin(self, keys: Sequence[BlockHash], ttl_s: float | None) -> None:
        """Pin a prefix, what is above it here included; raises ``RefusedError`` where that would be too much.

        O(blocks of it) where it is pinned already, O(blocks of the trie) where it isn't.
        """
        if self._trie._use_checkpoints:  # noqa: SLF001
            raise RefusedError("this model keeps recurrent state, without which a pinned prefix would be of no use")
        self.work()
        until_s = None if ttl_s is None else self._clock() + ttl_s
        if self._ledger.renew(keys, until_s):
            return
        path = tuple(dict.fromkeys((*self._above(keys[0]), *keys)))
        self._let_off(self._ledger.add(path, until_s, self.limit()))
        pinned = set(path)
        for node in [node for node in self._doomed if hash_of(node) in pinned]:
            del self._doomed[node]
        self._hold(path)

    def unpin(self, tip: BlockHash) -> bool:
        """End the pin that is called so, and return whether there was one."""
        self.work()
        if tip not in self._ledger.pins:
            return False
        self._end(tip)
        return True

    def invalidate(self, keys: Sequence[BlockHash]) -> Invalidation:
        """Forget blocks and all that follow them, in all tiers; see ``Invalidation``."""
        self.work()
        heads = set(find_nodes(self._trie, set(keys)).values())
        known = {*keys, *_hashes(with_what_follows(heads))}
        affected = known | self._held.following(known)
        unpinned = self._ledger.having(affected)
        for tip in unpinned:
            self._end(tip)
        freed, in_use = take_out(self._trie, heads)
        dropped = {_HBM: freed} | self._forget_below(affected)
        for node in heads:
            if node.is_attached() and node.parent not in heads:
                self._doomed.setdefault(node, set())
        return Invalidation(dropped=dropped, in_use_blocks=in_use, unpinned=[tip.hex() for tip in unpinned])

    def reset(self) -> dict[CacheTier, int]:
        """Forget all that no request uses, pinned or not; the pins stand, for when it is computed again."""
        self.let_go()
        dropped = {_HBM: evict_unused(self._trie)}
        if self._below is not None:
            self._held.release(list(self._held.held))
            dropped |= self._below.forget()
        self._hold(tuple(self._wanted))
        return dropped

    def report(self) -> Pins:
        """Return all pins and where their blocks are."""
        return self._ledger.report(
            self._places,
            now_s=self._clock(),
            block_tokens=self._trie.block_size,
            limit=self.limit(),
            errors=self._guard.errors,
        )

    def counts(self) -> dict[CacheTier, int]:
        """Return how many blocks of each tier are pinned."""
        return dict.fromkeys(self._tiers(), 0) | counted(map(self._places, list(self._wanted)))

    def limit(self) -> Limit:
        """Return how much may be pinned."""
        return limit_of(
            self._tiers(),
            share=self._share,
            setting="KVGATE_ENGINE_PIN_SHARE=",
            longest_blocks=self._longest_blocks,
            option="--session-len",
        )

    # What happens in the engine.

    def stored(self, nodes: Sequence[Any], keys: Sequence[BlockHash]) -> None:
        """Follow blocks that the trie has from now on. O(1) where nothing is pinned. Never raises."""
        if self._wanted:
            self._guard("hold new blocks", None, self._refer, zip(keys, nodes, strict=True))

    def changed_below(self, changes: Iterable[Change]) -> None:
        """Follow what tiers below HBM gained and lost. Never raises."""
        if self._wanted:
            self._guard("follow the tiers", None, self._held.follow, changes)

    def let_go(self) -> None:
        """Give back the references to HBM's blocks: they are about to be forgotten, and the pins stand."""
        tell_watchers(self._trie)  # or the pins would take references to what is new just before it is to go
        self._guard("let go", None, self._unrefer, list(self._in_hbm))

    def clear(self) -> None:
        """End all pins: no block has the name any more that they call it by."""
        for tip in list(self._ledger.pins):
            self._end(tip)
        self._doomed = {}

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Work whenever the engine's loop is free, until ``close``."""
        self.close()
        self.work()
        self._timer = loop.call_later(WORK_EVERY_S, self.follow, loop)

    def close(self) -> None:
        """Work no more; the thread of ``follow``'s loop."""
        if self._timer is not None:
            self._timer.cancel()

    def work(self) -> None:
        """End pins whose time is over, and forget what was to be forgotten and is free now. Never raises."""
        for tip in self._ledger.over(self._clock()):
            self._end(tip)
        if self._doomed:
            self._guard("forget blocks", None, self._forget_doomed)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when pins and what they hold contradict each other. O(pinned blocks)."""
        self._ledger.check_integrity()
        wanted = self._wanted.keys()
        must(self._in_hbm.keys() <= wanted, "a reference is kept for a block that no pin has")
        must(self._held.held.keys() <= wanted, "a block is held that no pin has")
        must(find_nodes(self._trie, wanted) == self._in_hbm, "not the pinned blocks of HBM are held")
        must(not self._guard.errors, "something failed")

    # Inside.

    def _tiers(self) -> dict[CacheTier, int]:
        """How many blocks each tier can have."""
        blocks, hierarchy = self._scheduler.block_manager, self._hierarchy
        reserved = int(self._scheduler.cache_config.num_reserved_gpu_blocks)
        below = {} if hierarchy is None else hierarchy.stats().tiers
        return {_HBM: int(blocks.num_gpu_blocks) - reserved} | {
            tier: stats.capacity_blocks for tier, stats in below.items()
        }

    @property
    def _hierarchy(self) -> HierarchyManager | None:
        return None if self._below is None else self._below.hierarchy

    def _places(self, key: BlockHash) -> tuple[CacheTier, ...]:
        below = self._held.places(key)
        return (_HBM, *below) if key in self._in_hbm else below

    def _above(self, key: BlockHash) -> list[BlockHash]:
        node = find_nodes(self._trie, {key}).get(key)
        return self._held.above(key) if node is None else path_above(node)

    def _hold(self, keys: Sequence[BlockHash]) -> None:
        self._refer(find_nodes(self._trie, set(keys) - self._in_hbm.keys()).items())
        self._held.hold(keys)

    def _refer(self, found: Iterable[tuple[BlockHash, Any]]) -> None:
        """Take references to wanted blocks that the pins have none to yet."""
        fresh = {
            key: node for key, node in found if key in self._wanted and key not in self._in_hbm and node.is_attached()
        }
        if fresh:
            self._scheduler.block_manager.pin_logical_blocks(_blocks(fresh.values()))
            self._in_hbm |= fresh

    def _unrefer(self, keys: Iterable[BlockHash]) -> None:
        nodes = [node for key in keys if (node := self._in_hbm.pop(key, None)) is not None]
        if nodes:
            self._scheduler.block_manager.release_logical_blocks(_blocks(nodes))

    def _end(self, tip: BlockHash) -> None:
        """Take back what a pin has that no other one does. Never raises."""
        self._let_off(self._ledger.end(tip))

    def _let_off(self, keys: list[BlockHash]) -> None:
        """Hold these no more. Never raises."""
        self._guard("unpin in HBM", None, self._unrefer, keys)
        self._guard("unpin below HBM", None, self._held.release, keys)

    def _forget_below(self, keys: Collection[BlockHash]) -> dict[CacheTier, int]:
        return {} if self._below is None else self._below.forget(keys)

    def _forget_doomed(self) -> None:
        """What requests saved at their end goes with what they used."""
        tell_watchers(self._trie)
        for node, followed in list(self._doomed.items()):
            followed.update(_hashes(with_what_follows((node,))))
            take_out(self._trie, (node,))
            if not node.is_attached():
                del self._doomed[node]
                self._forget_below(followed | self._held.following(followed))


def _hashes(nodes: Iterable[Any]) -> Iterator[BlockHash]:
    return (key for node in nodes if (key := hash_of(node)) is not None)


def _blocks(nodes: Iterable[Any]) -> "np.ndarray[Any, np.dtype[np.int64]]":
    return np.array([node.block_id for node in nodes], dtype=np.int64)


__all__ = ["Below", "PinBook"]
