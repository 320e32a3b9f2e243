"""Prefixes that stay in an engine: in its own memory by a hold as a request's, and in the tiers below by one there.

Both are what eviction stops at already, every policy's, and what a policy learns of when it takes over; so nothing else
has to know of pins. A pin is a standing order: a block that isn't there is held from the moment that it is, whether it
was computed, loaded or saved.

What is held takes room from requests for good. So pins together have at most a share of each tier, and in HBM they
leave room for the longest request that the instance takes: none waits for ever for blocks that never come free.

A block that is to be forgotten while a request uses it stays until that has ended (its save to the tiers included),
and is forgotten then; ``work`` looks after that, and after pins whose time is over.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from engines.control.guard import Guard
from engines.control.pin_ledger import HeldBelow, Limit, PinLedger, counted, limit_of
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockHash
from kvcontrol.core.integrity import must
from kvcontrol.core.prefix_control import Invalidation, Pins
from kvcontrol.kv_runtime import HierarchyManager
from kvcontrol.kv_runtime.ticket import Change

WORK_EVERY_S: Final = 0.25
_HBM = CacheTier.HBM


class TakenOut(NamedTuple):
    """How many blocks were forgotten, and how many stay because a request uses them."""

    blocks: int
    in_use_blocks: int


class PinnedMemory(Protocol):
    """An engine's own memory with pinned blocks. The engine's thread, except ``holds`` and the sizes."""

    @property
    def capacity_blocks(self) -> int:
        """How many blocks the memory can have."""

    @property
    def block_tokens(self) -> int:
        """How many tokens a block has."""

    def check(self) -> None:
        """Raise ``RefusedError`` where pinned blocks would be of no use."""

    def holds(self, key: BlockHash) -> bool:
        """Return whether a pinned block is here and held."""

    def above(self, key: BlockHash) -> Sequence[BlockHash] | None:
        """Return the ancestors of a block, from the head on; None if the block isn't resident."""

    def following(self, keys: Collection[BlockHash]) -> set[BlockHash]:
        """Return those of these blocks that are here, and all that follows them here."""

    def hold(self, keys: Collection[BlockHash]) -> None:
        """Hold those of the pinned blocks that are here."""

    def release(self, keys: Collection[BlockHash]) -> None:
        """Hold blocks no more that no pin has."""

    def release_all(self) -> None:
        """Hold nothing until ``hold``: all is about to be forgotten, and the pins stand."""

    def reset(self) -> int:
        """Forget all that no request uses and return how many blocks that was."""

    def take_out(self, keys: Collection[BlockHash]) -> TakenOut:
        """Drop blocks and their descendants; blocks in use are doomed: dropped when they are free."""

    @property
    def has_doomed(self) -> bool:
        """Whether some are to be forgotten yet."""

    def pardon(self, keys: Collection[BlockHash] | None) -> None:
        """Cancel the doom of these blocks, None for all: they are pinned again, or no block has the name any more."""

    def forget_doomed(self) -> set[BlockHash]:
        """Forget doomed blocks that are free now, and return them with all that was ever seen to follow them."""

    def check_integrity(self, wanted: Collection[BlockHash]) -> None:
        """Raise ``AssertionError`` when other blocks are held than these, as far as they are here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinRules:
    """How much may be pinned: ``share`` of each tier, called by ``setting``, and what the longest request leaves of
    HBM, which takes fewer blocks when ``option`` is smaller.
    """

    share: float
    setting: str
    longest_blocks: int
    option: str


class PinBook:
    """The pins of one engine; its thread's, but for ``report`` and ``counts``, which any may call.

    ``forget_below`` drops blocks in all tiers below HBM, None for all, and returns how many of each. Nothing but a
    refusal raises into the engine's loop.
    """

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        memory: PinnedMemory,
        ledger: PinLedger,
        rules: PinRules,
        *,
        hierarchy: Callable[[], HierarchyManager | None],
        forget_below: Callable[[Collection[BlockHash] | None], dict[CacheTier, int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.guard = Guard("pins")
        self._memory = memory
        self._ledger = ledger
        self._rules = rules
        self._hierarchy = hierarchy
        self._forget_below = forget_below
        self._clock = clock
        self._below = HeldBelow(hierarchy, ledger.wanted)
        self._timer: asyncio.TimerHandle | None = None

    # What operators ask.

    def pin(self, keys: Sequence[BlockHash], ttl_s: float | None) -> None:
        """Pin a prefix with its resident ancestors; raises ``RefusedError`` beyond the limit.

        O(blocks of it) where it is pinned already, O(blocks of the engine) where it isn't.
        """
        self._memory.check()
        self.work()
        until_s = None if ttl_s is None else self._clock() + ttl_s
        if self._ledger.renew(keys, until_s):
            return
        above = self._memory.above(keys[0])
        path = tuple(dict.fromkeys((*(self._below.above(keys[0]) if above is None else above), *keys)))
        self._let_off(self._ledger.add(path, until_s, self.limit()))
        self._memory.pardon(path)
        self._memory.hold(path)
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
        known = {*keys, *self._memory.following(keys)}
        affected = known | self._below.following(known)
        unpinned = self._ledger.having(affected)
        for tip in unpinned:
            self._let_off(self._ledger.end(tip))
        taken = self._memory.take_out(keys)
        return Invalidation(
            dropped={_HBM: taken.blocks} | self._forget_below(affected),
            in_use_blocks=taken.in_use_blocks,
            unpinned=[tip.hex() for tip in unpinned],
        )

    def reset(self) -> dict[CacheTier, int]:
        """Forget all that no request uses, pinned or not; the pins stand, for when it is computed again."""
        self.let_go()
        self._below.release(list(self._below.held))
        dropped = {_HBM: self._memory.reset()} | self._forget_below(None)
        wanted = tuple(self._ledger.wanted)
        self._memory.hold(wanted)
        self._below.hold(wanted)
        return dropped

    def report(self) -> Pins:
        """Return all pins and where their blocks are."""
        return self._ledger.report(
            self._places,
            now_s=self._clock(),
            block_tokens=self._memory.block_tokens,
            limit=self.limit(),
            errors=self.guard.errors,
        )

    def counts(self) -> dict[CacheTier, int]:
        """Return how many blocks of each tier are pinned."""
        return dict.fromkeys(self._tiers(), 0) | counted(map(self._places, list(self._ledger.wanted)))

    def limit(self) -> Limit:
        """Return how much may be pinned."""
        rules = self._rules
        return limit_of(
            self._tiers(),
            share=rules.share,
            setting=rules.setting,
            longest_blocks=rules.longest_blocks,
            option=rules.option,
        )

    # What happens in the engine.

    def changed_below(self, changes: Iterable[Change]) -> None:
        """Follow gains and losses of the tiers below HBM. Never raises."""
        if self._ledger.wanted:
            self.guard("follow the tiers", None, self._below.follow, changes)

    def let_go(self) -> None:
        """Hold nothing in HBM: its blocks are about to be forgotten, and the pins stand. Never raises."""
        self.guard("let go", None, self._memory.release_all)

    def clear(self) -> None:
        """End all pins: no block has the name any more that they call it by."""
        for tip in list(self._ledger.pins):
            self._let_off(self._ledger.end(tip))
        self._memory.pardon(None)

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
        """End expired pins, and drop doomed blocks that are free now. Never raises."""
        for tip in self._ledger.over(self._clock()):
            self._let_off(self._ledger.end(tip))
        if self._memory.has_doomed:
            self.guard("forget blocks", None, self._forget_doomed)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if pins and held blocks contradict each other. O(pinned blocks)."""
        self._ledger.check_integrity()
        wanted = self._ledger.wanted.keys()
        must(self._below.held.keys() <= wanted, "a block is held below HBM that no pin has")
        self._memory.check_integrity(wanted)
        must(not self.guard.errors, f"something failed: {self.guard.last_error}")

    # Inside.

    def _tiers(self) -> Mapping[CacheTier, int]:
        """How many blocks each tier can have."""
        hierarchy = self._hierarchy()
        below = {} if hierarchy is None else hierarchy.stats().tiers
        return {_HBM: self._memory.capacity_blocks} | {tier: stats.capacity_blocks for tier, stats in below.items()}

    def _places(self, key: BlockHash) -> tuple[CacheTier, ...]:
        below = self._below.places(key)
        return (_HBM, *below) if self._memory.holds(key) else below

    def _let_off(self, keys: Collection[BlockHash]) -> None:
        """Hold these no more. Never raises."""
        self.guard("unpin in HBM", None, self._memory.release, keys)
        self.guard("unpin below HBM", None, self._below.release, keys)

    def _forget_doomed(self) -> None:
        """What requests saved at their end goes with what they used."""
        gone = self._memory.forget_doomed()
        if gone:
            self._forget_below(gone | self._below.following(gone))
