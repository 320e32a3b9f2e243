"""Residency of blocks in the tiers, their holders, and the changes for subscribers.

The one place where copies come and go, so that slots, policies, accounts and what is told can't part. A slot is given
back when nothing wants the copy any more *and* no transfer uses it, whichever comes last.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import count
from typing import Final

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockHash, BlockId
from kvcontrol.core.integrity import must
from kvcontrol.kv_runtime.prompt import Prompt
from kvcontrol.kv_runtime.record import BlockRecord, Recovered
from kvcontrol.kv_runtime.resident import Block, Copy
from kvcontrol.kv_runtime.ticket import Change
from kvcontrol.kv_runtime.tier_space import TierSpace

_DDR: Final = CacheTier.DDR
_NVME: Final = CacheTier.NVME


class Loss(StrEnum):
    """Why a tier's copy of a block went."""

    EVICTED = "evicted"
    """For another block; it is still in another tier."""
    EVICTED_LAST = "evicted_last"
    """For another block; it was the last copy."""
    CORRUPT = "corrupt"
    FAILED = "failed"
    """Its tier could not give it."""
    UNWRITTEN = "unwritten"
    """It was to go to the tier below, which didn't take it."""
    DROPPED = "dropped"
    """The caller said so."""


class Residency:
    """See the module's text. Not thread-safe, but ``get`` may be called from any thread."""

    def __init__(self, spaces: Mapping[CacheTier, TierSpace], *, clock: Callable[[], float]) -> None:
        self.spaces = spaces
        self.losses: Counter[tuple[CacheTier, Loss]] = Counter()
        self.to_erase: list[Copy] = []
        """Copies whose slots are free once they have been erased."""
        self._clock = clock
        self._ids = count()
        self._blocks: dict[BlockId, Block] = {}
        self._by_key: dict[BlockHash, Block] = {}
        self._changes: list[Change] = []

    def __len__(self) -> int:
        """Return the number of blocks that can be found or are about to."""
        return len(self._by_key)

    def get(self, block_id: BlockId) -> Block | None:
        """Return a block that is there or was and is still held; any thread."""
        return self._blocks.get(block_id)

    def of_key(self, key: BlockHash) -> Block | None:
        """Return the block of a key, arriving ones too."""
        return self._by_key.get(key)

    def of_keys(
        self, keys: Sequence[BlockHash], tokens: Sequence[bytes]
    ) -> Iterable[tuple[BlockHash, bytes, Block | None]]:
        """Return each key with its tokens and its block, as ``of_key``."""
        return zip(keys, tokens, map(self._by_key.get, keys), strict=True)

    def blocks(self) -> Iterable[Block]:
        """Return all blocks that can be found or are about to."""
        return self._by_key.values()

    def all(self) -> Iterable[Block]:
        """Return all blocks, also held ones that were dropped."""
        return self._blocks.values()

    def new(self, record: BlockRecord) -> Block:
        """Return a new block, which nothing holds and which is nowhere yet; its key must be free."""
        block = Block(BlockId(next(self._ids)), record, self._clock())
        must(record.key not in self._by_key, f"block {block.block_id} is given the key of another")
        self._blocks[block.block_id] = self._by_key[record.key] = block
        return block

    def restore(self, tier: CacheTier, found: Iterable[Recovered]) -> None:
        """Follow blocks that an earlier process left in a tier; duplicates are erased.

        Of their order of use nothing is known: heads count as used after their tails.
        """
        space = self.spaces[tier]
        arrivals: dict[BlockId, tuple[Block, Copy]] = {}
        for slot, seal in found:
            block = self._by_key.get(seal.record.key)
            if block is None:
                block = self.new(seal.record)
                block.checksum = seal.checksum
            copy = space.slots.claim(slot, block.record.tenant)
            same = (block.record, block.checksum) == seal
            if same and block.block_id not in arrivals:
                arrivals[block.block_id] = (block, copy)
            else:
                self.discard(copy, erase=True)
        if arrivals:
            depths = self._depths()
            self.land(sorted(arrivals.values(), key=lambda arrival: depths[arrival[0].record.key]))

    def take_changes(self) -> tuple[Change, ...]:
        """Return the blocks gained and lost since the last call."""
        changes = tuple(self._changes)
        self._changes.clear()
        return changes

    # Holds.

    def hold(self, path: Sequence[Block]) -> None:
        """Keep blocks, each named once, from being evicted until as many ``release``."""
        first = []
        for block in path:
            if not block.holds:
                first.append(block)
            block.holds += 1
        if first:
            for tier, space in self.spaces.items():
                here = [block for block in first if tier in block.copies]
                if here:
                    space.hold(here)

    def release(self, path: Sequence[Block]) -> None:
        """Undo one ``hold``; the blocks count as used now."""
        now_s = self._clock()
        last = []
        for block in path:
            holds = block.holds - 1
            if holds < 0:
                raise AssertionError(f"block {block.block_id} is released without a hold")
            block.holds = holds
            block.last_access_s = now_s
            if not holds:
                last.append(block)
        if not last:
            return
        for tier, space in self.spaces.items():
            here = [block for block in last if tier in block.copies]
            if here:
                space.release(here)
        for block in last:
            if not block.copies:
                self.settle(block)

    @property
    def follows_requests(self) -> bool:
        """Whether a tier's policies use ``requested``."""
        return any(space.policies.follows_requests for space in self.spaces.values())

    def requested(self, prompt: Prompt, found: Sequence[BlockId]) -> None:
        """Follow a prompt that came and the use of its leading blocks, of which ``found`` are there. O(blocks)."""
        blocks = [self._blocks[block_id] for block_id in found]
        for space in self.spaces.values():
            if space.policies.follows_requests:
                space.requested(prompt, blocks)

    # Slots and copies.

    def reserve(self, tier: CacheTier, tenant: str, blocks: int) -> list[Copy]:
        """Return slots, with evictions if needed; see ``TierSpace.reserve``."""
        return self.spaces[tier].reserve(tenant, blocks, lambda victims: self._evict(tier, victims))

    def trim(self, tier: CacheTier, tenant: str, blocks: int) -> None:
        """Evict up to so many blocks of one tenant."""
        self._evict(tier, self.spaces[tier].victims(tenant, blocks))

    def land(self, arrivals: Sequence[tuple[Block, Copy]]) -> None:
        """Follow arrived copies in one tier, in prompt order."""
        tier = arrivals[0][1].tier
        for block, copy in arrivals:
            block.copies[tier] = copy
        self._changes += [Change(block.block_id, tier, True, block.record) for block, _ in arrivals]  # noqa: FBT003
        self.spaces[tier].insert([block for block, _ in arrivals])

    def touch_before(self, block: Block, tier: CacheTier) -> None:
        """Count a block's ancestors as used now, O(their number).

        Paths come in parts, heads before tails; without this, heads would look older than their tails.
        """
        before = self._before(block, tier)
        if before:
            self.spaces[tier].access(before)

    def lose(self, block: Block, tier: CacheTier, loss: Loss, *, erase: bool = False) -> None:
        """Follow a copy that can't be used any more; nothing happens where there is none."""
        if tier in block.copies:
            self.spaces[tier].remove(block)
            self._take_away(block, tier, loss, erase=erase)

    def drop(self, block: Block) -> None:
        """Drop a block from all tiers for good; held ones too."""
        block.dropped = True
        for tier in tuple(block.copies):
            self.lose(block, tier, Loss.DROPPED, erase=True)
        if self._by_key.get(block.record.key) is block:
            del self._by_key[block.record.key]
        self.settle(block)

    def keep(self, block: Block, copy: Copy) -> None:
        """A transfer of which no ticket holds the block uses a copy's slot: no policy chooses it until ``let_go``."""
        copy.keeps += 1
        if copy.keeps == 1 and block.copies.get(copy.tier) is copy:
            self.spaces[copy.tier].keep(block)

    def let_go(self, block: Block, copy: Copy) -> None:
        """Undo one ``keep``."""
        copy.keeps -= 1
        if not copy.keeps and block.copies.get(copy.tier) is copy:
            self.spaces[copy.tier].let_go(block)

    def stay(self, block: Block, tier: CacheTier) -> None:
        """Keep a copy that was leaving: the tier below refused it, and its slot is not needed."""
        self.spaces[tier].stay(block)

    def unpin(self, copy: Copy) -> None:
        """A transfer no longer uses a copy's slot."""
        copy.pins -= 1
        if copy.doomed and not copy.pins:
            self._give_back(copy)

    def discard(self, copy: Copy, *, erase: bool = False) -> None:
        """Give back a slot that never became a block's copy, or is none any more."""
        copy.erase = erase and copy.tier is _NVME
        copy.doomed = True
        if not copy.pins:
            self._give_back(copy)

    def erased(self, copies: Iterable[Copy]) -> None:
        """Follow copies of ``to_erase`` that have been."""
        for copy in copies:
            self.spaces[copy.tier].slots.free(copy)

    def settle(self, block: Block) -> None:
        """Forget a block of which nothing is left."""
        if block.gone:
            if self._by_key.get(block.record.key) is block:
                del self._by_key[block.record.key]
            if not block.holds:
                self._blocks.pop(block.block_id, None)

    def check_integrity(self, moving: Iterable[Copy]) -> None:
        """Raise ``AssertionError`` if the parts contradict each other; ``moving``: slots in transfers. O(blocks)."""
        pins = Counter(moving)
        for copy in self.to_erase:
            pins[copy] += 0
        for tier, space in self.spaces.items():
            here = [block for block in self._by_key.values() if tier in block.copies]
            space.check_integrity(here)
            copies = {block.copies[tier] for block in here} | {copy for copy in pins if copy.tier is tier}
            slots = {copy.slot for copy in copies}
            must(len(slots) == len(copies), f"{tier}: a slot has two owners")
            must(
                len(slots) == space.slots.used, f"{tier}: {space.slots.used} slots are used, {len(slots)} have an owner"
            )
        for block in self._by_key.values():
            for copy in block.copies.values():
                stays = block.holds > 0 or copy.keeps > 0 or copy.leaving
                must(
                    stays or not copy.pins, f"{copy.tier}: block {block.block_id} may be evicted and its slot is in use"
                )
        for key, block in self._by_key.items():
            must(block.record.key == key, f"block {block.block_id} stands under another's key")
            must(self._blocks.get(block.block_id) is block, f"block {block.block_id} has lost its number")
            must(bool(block.copies) or block.arriving > 0, f"block {block.block_id} is nowhere")
            must(block.holds >= 0 and block.arriving >= 0, f"block {block.block_id} was let go of too often")
        for block in self._blocks.values():
            must(block.holds > 0 or not block.gone, f"block {block.block_id} should be forgotten")

    def _depths(self) -> dict[BlockHash, int]:
        """Return how many known blocks come before each in its prompt. O(blocks)."""
        depths: dict[BlockHash, int] = {}
        for block in self._by_key.values():
            path = []
            key: BlockHash | None = block.record.key
            while key is not None and key not in depths and (head := self._by_key.get(key)) is not None:
                depths[key] = 0  # also ends a circle, which a file may hold
                path.append(key)
                key = head.record.parent
            depth = 0 if key is None else depths.get(key, -1) + 1
            for member in reversed(path):
                depths[member] = depth
                depth += 1
        return depths

    def _before(self, block: Block, tier: CacheTier) -> list[Block]:
        """Return the unheld ancestors of a block in a tier, without a gap."""
        before = []
        seen = {block.block_id}
        parent = block.record.parent
        while parent is not None and (head := self._by_key.get(parent)) is not None and tier in head.copies:
            if head.block_id in seen:
                break  # records come from files, too: they may say anything
            seen.add(head.block_id)
            if not head.holds and not head.copies[tier].leaving:
                before.append(head)
            parent = head.record.parent
        before.reverse()
        return before

    def _evict(self, tier: CacheTier, victims: Sequence[BlockId]) -> None:
        """Take away copies that a policy has chosen and forgotten."""
        for block_id in victims:
            block = self._blocks[block_id]
            last = len(block.copies) == 1 and not block.arriving
            self._take_away(block, tier, Loss.EVICTED_LAST if last else Loss.EVICTED, erase=False)

    def _take_away(self, block: Block, tier: CacheTier, loss: Loss, *, erase: bool) -> None:
        copy = block.copies.pop(tier)
        if copy.keeps:
            self.spaces[tier].let_go(block)
        self.losses[tier, loss] += 1
        self._changes.append(Change(block.block_id, tier, gained=False, record=block.record))
        self.discard(copy, erase=erase)
        self.settle(block)

    def _give_back(self, copy: Copy) -> None:
        if copy.erase:
            self.to_erase.append(copy)
        else:
            self.spaces[copy.tier].slots.free(copy)
