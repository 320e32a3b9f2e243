"""What engines hold that publish nothing: learned from what was sent there, corrected by what their answers say.

A prompt whose first token has come is in its engine's cache; what else is still there can only be guessed. Engines
evict what was used longest ago, so each instance's blocks are kept in that order, up to a capacity, tails before heads.
An answer's ``cached_tokens`` then says how good the guess was:

    less than was expected -> what the prompt's missing block was used before, is gone too: all blocks not used since
                              are forgotten, and what is left is about what fits: that becomes the capacity
    as much, or more       -> the guess was right or low: the capacity may grow again

So a small cache is found out by its first false hit, not after its worth of misses. Blocks live in the same index as
those of engines that publish events; this is the only writer of its instances' part.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat

from kvcontrol.core.blocks import CacheIdentity, CacheTier
from kvcontrol.core.events import BlockRemoved
from kvcontrol.core.ids import BlockHash, InstanceId
from kvcontrol.prefix_reuse import FleetIndex

BLOCK_TOKENS = 64
TEXT_BLOCK_TOKENS = 256
_GROWTH = 200
_LEAST_BLOCKS = 4


@lru_cache(maxsize=256)
def learned_identity(model: str, *, textual: bool) -> CacheIdentity:
    """Return what stands for the cache of an engine that says nothing about it. ``textual``: blocks are of text."""
    return CacheIdentity(
        model=model,
        revision="learned",
        kv_dtype="text" if textual else "tokens",
        block_size_tokens=TEXT_BLOCK_TOKENS if textual else BLOCK_TOKENS,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """What was expected of an instance when a prompt was routed there: of its ``hashes`` the first ``len(ages)``;
    ``ages`` says when each had been used last, in the instance's own count.
    """

    instance: InstanceId
    hashes: Sequence[BlockHash]
    ages: tuple[int, ...]


class _Memory:
    __slots__ = ("blocks", "capacity", "turn")

    def __init__(self, capacity: int) -> None:
        self.blocks: OrderedDict[BlockHash, int] = OrderedDict()  # in the order in which they will be given up
        self.capacity = capacity
        self.turn = 0


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
            if guess.ages:
                memory.capacity = min(self._most, memory.capacity + 1 + memory.capacity // _GROWTH)
            return 0
        self._forget_before(guess.instance, memory, guess.ages[held])
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
        memory.turn = turn = memory.turn + 1
        blocks = memory.blocks
        new: list[tuple[BlockHash, BlockHash | None]] = []
        if not all(map(blocks.__contains__, hashes)):
            new = [
                (block, parent) for block, parent in zip(hashes, (None, *hashes), strict=False) if block not in blocks
            ]
        to_end = blocks.move_to_end
        for block in reversed(hashes):  # heads are used last, so they stay longest
            blocks[block] = turn
            to_end(block)
        if new:
            self._index.extend(instance, CacheTier.HBM, new)
        self._trim(instance, memory, len(memory.blocks) - max(memory.capacity, len(hashes)))

    def _forget_before(self, instance: InstanceId, memory: _Memory, age: int) -> None:
        """Forget the blocks that have not been used since ``age``."""
        count = 0
        for used in memory.blocks.values():
            if used > age:
                break
            count += 1
        self._trim(instance, memory, count)

    def _trim(self, instance: InstanceId, memory: _Memory, count: int) -> None:
        if count > 0:
            gone = tuple(memory.blocks.popitem(last=False)[0] for _ in range(count))
            self._index.apply(instance, BlockRemoved(block_hashes=gone))


__all__ = ["BLOCK_TOKENS", "TEXT_BLOCK_TOKENS", "Guess", "LearnedAffinity", "learned_identity"]
