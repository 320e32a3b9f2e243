"""The engine's own memory: blocks that its prefix cache has, under their names, and blocks of one request alone.

    free ── take ──▶ a request's own ── attach ──▶ cached, held ── release ──▶ cached ── a policy's choice ──▶ free
      ▲                    │ give
      └────────────────────┘

Which cached block goes is an ``EvictionPolicy``'s to say, tails before heads. A block is a slot, and the slot is its
name to the policy and to the tiers below.
"""

from collections.abc import Callable, Collection, Sequence

from engines.sim.cached import CachedBlocks
from engines.sim.sink import BlockSink
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.hashing import TOKEN_BYTES
from kvcontrol.core.ids import BlockHash, BlockId
from kvcontrol.core.integrity import must
from kvcontrol.kv_policy import EvictionPolicy, PolicyContext, TailsFirst

_HBM = CacheTier.HBM


class PrefixPool:
    """See the module's text. Everything is O(1) a block."""

    def __init__(self, *, capacity_blocks: int, block_tokens: int, policy: EvictionPolicy, sink: BlockSink) -> None:
        self.capacity_blocks = capacity_blocks
        self.evicted_blocks = 0
        self.witness: Callable[[Collection[BlockHash]], None] | None = None
        """Is told of blocks that are cached from now on."""
        self._policy = TailsFirst(policy)
        self._sink = sink
        self._width = block_tokens * TOKEN_BYTES
        self._free = list(range(capacity_blocks - 1, -1, -1))
        self.cached = CachedBlocks(self._parent_of)
        """Blocks that a later request could find."""
        self._holds: dict[BlockHash, int] = {}

    @property
    def policy(self) -> EvictionPolicy:
        """The policy that chooses the victims."""
        return self._policy.policy

    @property
    def free_blocks(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """Slots that are cached or a request's own."""
        return self.capacity_blocks - len(self._free)

    @property
    def available_blocks(self) -> int:
        """How many could be taken now: what is free, and what is cached and held by nobody."""
        return len(self._free) + len(self.cached) - len(self._holds)

    def requested(self, keys: Sequence[BlockHash], *, block_tokens: int, prompt_tokens: int) -> None:
        """Tell the policy of a prompt that came, before anything of it is used."""
        if self._policy.follows_prompts:
            self._policy.requested(keys, block_tokens=block_tokens, prompt_tokens=prompt_tokens)

    def use(self, keys: Sequence[BlockHash]) -> None:
        """Count cached blocks as used, and hold them until ``release``."""
        path = self.cached.slots_of(keys)
        self._policy.access(path)
        self._policy.hold(path)
        self._hold(keys)

    def keep(self, keys: Sequence[BlockHash]) -> None:
        """Hold cached blocks until ``release``, which is no use of them; what comes before them must be held too."""
        self._policy.hold(self.cached.slots_of(keys))
        self._hold(keys)

    def release(self, keys: Sequence[BlockHash]) -> None:
        """Undo one hold of each."""
        holds = self._holds
        self._policy.release(self.cached.slots_of(keys))
        for key in keys:
            if holds[key] > 1:
                holds[key] -= 1
            else:
                del holds[key]

    def take(self, blocks: int, incoming: Sequence[BlockHash] = ()) -> list[int] | None:
        """Return slots for a request, evicting as far as needed; None, and nothing has changed, when there is no room.

        ``incoming`` are the names that will lie there, as far as they are known: some policies look at them.
        """
        if blocks > self.available_blocks:
            return None
        short = blocks - len(self._free)
        if short > 0:
            self._evict(short, incoming)
        if not blocks:
            return []
        taken = self._free[-blocks:]
        del self._free[-blocks:]
        return taken

    def give(self, slots: Sequence[int]) -> None:
        """Take back a request's own slots."""
        self._free.extend(slots)

    def attach(
        self, keys: Sequence[BlockHash], first: int, last: int, slots: Sequence[int], tokens: Sequence[bytes]
    ) -> None:
        """Put a request's own ``slots`` into the cache, as blocks ``first`` to ``last`` - 1 of its path, and hold them.

        What is cached already under a name stays, and the request's own copy of it goes. Of ``tokens``, those that are
        a block long are told; others only stand for tokens.
        """
        cached = self.cached
        new: list[int] = []
        fresh: list[BlockId] = []
        there: list[BlockHash] = []
        for place, slot in zip(range(first, last), slots, strict=True):
            key = keys[place]
            if key in cached:
                self._free.append(slot)
                there.append(key)
                continue
            new.append(place)
            fresh.append(cached.add(key, BlockId(slot)))
        if there:
            self.use(there)
        if not new:
            return
        names = [keys[place] for place in new]
        parents = [keys[place - 1] if place else None for place in new]
        self._policy.insert(fresh, names, parents)
        self._policy.hold(fresh)
        self._hold(names)
        width = self._width
        known_tokens = [tokens[place] if len(tokens[place]) == width else b"" for place in new]
        self._sink.stored_all(list(zip(names, parents, known_tokens, strict=True)), tier=_HBM)
        if self.witness is not None:
            self.witness(names)

    def reset(self) -> int:
        """Forget all that nobody holds; returns how many blocks."""
        idle = len(self.cached) - len(self._holds)
        if idle:
            self._evict(idle, ())
        return idle

    def drop(self, keys: Sequence[BlockHash]) -> int:
        """Forget those of cached blocks, heads before tails, that nobody holds; returns how many.

        What follows them must be named too.
        """
        gone = [key for key in reversed(keys) if key not in self._holds]
        if gone:
            slots = self.cached.slots_of(gone)
            self._policy.remove(slots)
            self.cached.remove(slots)
            self._free.extend(slots)
            self._sink.removed_all(gone, tier=_HBM)
        return len(gone)

    def swap(self, policy: EvictionPolicy) -> None:
        """Let another policy, an empty one, choose from now on; all that is cached stays. O(blocks)."""
        heir = self._policy.hand_over(policy, ())
        for key, times in self._holds.items():
            for _ in range(times):
                heir.hold(self.cached.slots_of([key]))
        self._policy = heir

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the parts contradict each other. O(blocks)."""
        self._policy.check_integrity()
        self.cached.check_integrity()
        must(len(self._policy) == len(self.cached), "the policy knows other blocks than are cached")
        must(all(key in self.cached for key in self._holds), "a block is held that isn't cached")
        free = set(self._free)
        must(len(free) == len(self._free), "a slot is free twice")
        must(free.isdisjoint(self.cached.slots), "a cached block's slot is free")

    def _parent_of(self, block: BlockId) -> object:
        return self._policy.parent_of(block)  # of the policy that is in charge now

    def _evict(self, blocks: int, incoming: Sequence[BlockHash]) -> None:
        context = PolicyContext(
            tier=_HBM,
            wanted_blocks=blocks,
            used_blocks=len(self.cached),
            capacity_blocks=self.capacity_blocks,
            incoming=incoming,
        )
        victims = self._policy.select_victims(context).victims
        if len(victims) < blocks:
            raise AssertionError(f"{self._policy.name} chose {len(victims)} of {blocks} evictable blocks")
        gone = self.cached.remove(victims)
        self._free.extend(victims)
        self.evicted_blocks += len(gone)
        self._sink.removed_all(gone, tier=_HBM)

    def _hold(self, keys: Sequence[BlockHash]) -> None:
        holds = self._holds
        for key in keys:
            holds[key] = holds.get(key, 0) + 1
