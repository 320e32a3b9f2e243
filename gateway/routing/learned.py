"""Residency of engines without KV events: learned from routed requests, corrected by reported usage.

A prompt whose first token has come is in its engine's cache; what else is still there can only be guessed. Engines
evict what was used longest ago, so each instance's blocks are kept in that order, up to a capacity, tails before heads.
An answer's ``cached_tokens`` then says how good the guess was:

    less than was expected -> what the prompt's missing block was used before, is gone too: all blocks not used since
                              are forgotten, and what is left is about what fits: that becomes the capacity
    as much                -> the guess was right: the capacity may grow again
    more                   -> it was low: the capacity grows by what was taken for gone

So a small cache is found out by its first false hit, not after its worth of misses. Blocks live in the same index as
those of engines that publish events; this is the only writer of its instances' part.
"""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from typing import Final, NamedTuple

from kvcontrol.core.blocks import CacheIdentity, CacheTier
from kvcontrol.core.events import BlockRemoved
from kvcontrol.core.ids import BlockHash, InstanceId
from kvcontrol.prefix_reuse import FleetIndex

BLOCK_TOKENS = 64
TEXT_BLOCK_TOKENS = 256
_GROWTH = 200
_LEAST_BLOCKS = 4
_LOGGED_AT_LEAST: Final = 1024


@lru_cache(maxsize=256)
def learned_identity(model: str, *, textual: bool) -> CacheIdentity:
    """Return what stands for the cache of an engine that says nothing about it. ``textual``: blocks are of text."""
    return CacheIdentity(
        model=model,
        revision="learned",
        kv_dtype="text" if textual else "tokens",
        block_size_tokens=TEXT_BLOCK_TOKENS if textual else BLOCK_TOKENS,
    )


@lru_cache(maxsize=256)
def sent_identity(model: str) -> CacheIdentity:
    """Return what names blocks of text that are sent to an engine which announces its blocks, and never these."""
    return CacheIdentity(model=model, revision="sent", kv_dtype="text", block_size_tokens=BLOCK_TOKENS)


class Guess(NamedTuple):
    """What was expected of an instance when a prompt was routed there: of its ``hashes`` the first ``len(ages)``;
    ``ages`` says when each had been used last, in the instance's own count.
    """

    instance: InstanceId
    hashes: Sequence[BlockHash]
    ages: tuple[int, ...]


class _Memory:
    """One instance's blocks, each with the turn in which it was used last.

    Their order is that of ``uses``, in which a use that was followed by another one of its block says nothing any more:
    a prompt's blocks are noted together, where a linked list would have each of them moved, all over the memory.
    """

    __slots__ = ("_logged", "_uses", "blocks", "capacity", "tick")

    def __init__(self, capacity: int) -> None:
        self.blocks: dict[BlockHash, int] = {}
        self.capacity = capacity
        self.tick = 0
        self._uses: deque[tuple[int, Sequence[BlockHash], int]] = deque()  # turn, prompt, how many are left of it
        self._logged = 0

    def use(self, hashes: Sequence[BlockHash]) -> None:
        """Note that a prompt with these blocks was computed. O(blocks), over many calls."""
        self.tick = tick = self.tick + 1
        self.blocks.update(dict.fromkeys(hashes, tick))
        self._uses.append((tick, hashes, len(hashes)))
        self._logged += len(hashes)
        if self._logged > 2 * len(self.blocks) + _LOGGED_AT_LEAST:
            self._compact()

    def give_up(self, count: int) -> list[BlockHash]:
        """Forget so many blocks, or all: those not used for longest, and of a prompt its tail first."""
        gone: list[BlockHash] = []
        while self._uses and len(gone) < count:
            self._give_up_of_first(count, gone)
        return gone

    def give_up_unused_since(self, tick: int) -> list[BlockHash]:
        """Forget all that has not been used since a turn."""
        gone: list[BlockHash] = []
        more = len(self.blocks) + 1  # than can be given up
        while self._uses and self._uses[0][0] <= tick:
            self._give_up_of_first(more, gone)
        return gone

    def _give_up_of_first(self, count: int, gone: list[BlockHash]) -> None:
        """Add to ``gone`` what was used last in the oldest use, until there are ``count``."""
        tick, hashes, end = self._uses[0]
        blocks = self.blocks
        while end and len(gone) < count:
            end -= 1
            if blocks.get(hashes[end]) == tick:
                del blocks[hashes[end]]
                gone.append(hashes[end])
        if end:
            self._uses[0] = tick, hashes, end
        else:
            self._uses.popleft()
            self._logged -= len(hashes)

    def _compact(self) -> None:
        blocks = self.blocks
        valid = (
            (tick, [block for block in hashes[:end] if blocks.get(block) == tick]) for tick, hashes, end in self._uses
        )
        self._uses = deque((tick, kept, len(kept)) for tick, kept in valid if kept)
        self._logged = len(blocks)


class LearnedAffinity:
    """One memory for each instance that publishes nothing. Every call is O(blocks of the prompt + blocks forgotten)."""

    def __init__(self, index: FleetIndex, *, capacity_tokens: int) -> None:
        self._index = index
        self._most = max(_LEAST_BLOCKS, capacity_tokens // BLOCK_TOKENS)
        self._memories: dict[InstanceId, _Memory] = {}

    def guess(self, instance: InstanceId, hashes: Sequence[BlockHash], matched: int) -> Guess:
        """Return what is to be compared with the answer: the first ``matched`` of ``hashes`` are believed held."""
        memory = self._memories.get(instance)
        ages = () if memory is None else tuple(map(memory.blocks.get, hashes[:matched], repeat(0)))
        return Guess(instance=instance, hashes=hashes, ages=ages)

    def computed(self, guess: Guess) -> None:
        """Note that an instance has the whole prompt in its cache now."""
        self._touch(guess.instance, guess.hashes)

    def answered(self, guess: Guess, *, held: int) -> int:
        """Correct what is known: ``held`` leading blocks came from the cache. Return by how many the guess was too
        high; one block more or less is how engines round.
        """
        memory = self._memories.get(guess.instance)
        if memory is None:
            return 0
        missing = len(guess.ages) - held
        if missing <= 1:
            if guess.ages or held:  # what was believed gone and is there, fits beside all that is believed held
                found = max(0, -missing)
                memory.capacity = min(self._most, memory.capacity + found + 1 + memory.capacity // _GROWTH)
            return 0
        self._removed(guess.instance, memory.give_up_unused_since(guess.ages[held]))
        # Not even those used since fit beside what was missing: it is counted among them again, if it was computed.
        memory.capacity = max(_LEAST_BLOCKS, len(guess.hashes), len(memory.blocks) - missing)
        self._trim(guess.instance, memory, len(memory.blocks) - memory.capacity)
        return missing

    def held(self, instance: InstanceId) -> int:
        """Return how many blocks an instance is believed to hold."""
        memory = self._memories.get(instance)
        return 0 if memory is None else len(memory.blocks)

    def forget(self, instance: InstanceId) -> None:
        """Forget all of an instance: it is gone, or was started anew."""
        if self._memories.pop(instance, None) is not None:
            self._index.drop(instance)

    def _touch(self, instance: InstanceId, hashes: Sequence[BlockHash]) -> None:
        memory = self._memories.get(instance)
        if memory is None:
            memory = self._memories[instance] = _Memory(self._most)
        blocks = memory.blocks
        new: list[tuple[BlockHash, BlockHash | None]] = []
        if not all(map(blocks.__contains__, hashes)):
            new = [
                (block, parent) for block, parent in zip(hashes, (None, *hashes), strict=False) if block not in blocks
            ]
        memory.use(hashes)
        if new:
            self._index.extend(instance, CacheTier.HBM, new)
        self._trim(instance, memory, len(blocks) - max(memory.capacity, len(hashes)))

    def _trim(self, instance: InstanceId, memory: _Memory, count: int) -> None:
        if count > 0:
            self._removed(instance, memory.give_up(count))

    def _removed(self, instance: InstanceId, blocks: Sequence[BlockHash]) -> None:
        if blocks:
            self._index.apply(instance, BlockRemoved(block_hashes=tuple(blocks)))
