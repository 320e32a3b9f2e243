"""The fleet's residency index: for every block, a bit mask of the instances that hold it.

A chained hash names the whole prefix, so no tree is needed to know what comes before a block, and one look-up answers
for all instances at once. Along a prompt the masks can only lose bits as long as instances are *prefix-closed*: who
holds a block holds all before it. Then the place where each instance stops is found by halving, with
O(distinct stops x log blocks) look-ups instead of one a block: 11 for a prompt of 2,048 blocks and one owner.

Closedness is not believed but kept account of. A block's parent is known from its ``BlockStored`` (or a snapshot with
parents), and each instance counts the held children of each block, *by what it said itself*. As long as one of these
blocks is not held, a hole, the instance is *ragged* and is matched by walking the prompt, which is always right. It is
whole again as soon as the hole is filled or all behind it is gone, in whatever order that happened. So
``PrefixMatch.blocks`` is exact for every history of an instance that tells the truth about parents; one that lies can
only mislead about itself, as it could by claiming blocks that it doesn't hold. What one says makes no other one ragged:
parents are kept once for all, and where an instance contradicts whoever spoke first, its own word is kept beside.
A ragged instance gets no new snapshot: what it told of itself would be the same.

The split between tiers is found by halving too: exact where faster tiers hold the beginning of a run and slower ones
its end, which is how a hierarchy that demotes tails before heads leaves them; otherwise a good guess.

Memory: three dictionary slots and one 16-byte key a block, one slot more for each further holder; masks are shared.
One slot more for a block whose parent is told in two ways, and for a hole.
Rejected: a radix tree with owners on its nodes (splits and merges on every event, several times the memory), one set
per instance (``NaiveFleetIndex``: O(instances x blocks)), a plain walk with masks (O(blocks): 60 us and more at 2,048).
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from operator import and_, is_

from kvcontrol.core import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, CacheTier, InstanceId, KvEvent
from kvcontrol.core.control import Residents
from kvcontrol.core.integrity import must
from kvcontrol.prefix_reuse.holders import ONE_CHILD, TIER_BIT, TIERS, Holder, Matches, bits_of, split
from kvcontrol.prefix_reuse.match import PrefixMatch

_ANY_TIER = (1 << len(TIERS)) - 1
_HBM_BIT = TIER_BIT[CacheTier.HBM]
_MAX_SHARED_MASKS = 1 << 16
_MAX_NAMED_MASKS = 1 << 12
_SWEPT_PER_STORE = 4
_SWEPT_PER_CALL = 16
_SWEPT_PER_TURN = 512
"""About half a millisecond of work."""


Run = tuple[int, Mapping[CacheTier, int], tuple[InstanceId, ...]]
"""So many leading blocks of a prompt, how many of them in which tier, and who holds these."""


class FleetIndex:
    """Which instance holds which blocks in which tier.

    One writer and its readers share a thread (the gateway's event loop). ``apply`` is O(1) a block, ``drop`` and
    clearing are O(1): what a lost instance held is taken out of the tables little by little, with each later call (also
    ``match``, whose answer that doesn't change) or by ``sweep``, and counts for nothing from the first moment.
    ``match`` is described above. For what is no block, parent or tier there is a ``TypeError`` or ``ValueError``, and
    the tables stay true.
    """

    def __init__(self) -> None:
        self._holders: dict[BlockHash, int] = {}
        self._parent: dict[BlockHash, BlockHash | None] = {}
        self._by_instance: dict[InstanceId, Holder] = {}
        self._names: dict[int, InstanceId] = {}  # by bit
        self._places = 0
        self._free_places: list[int] = []
        self._live = 0
        self._ragged = 0
        self._retired: deque[Holder] = deque()
        self._masks: dict[int, int] = {}
        self._tiered = 0  # whoever may hold a block outside of HBM: all who do, and maybe more
        self._named: dict[int, tuple[tuple[InstanceId, ...], list[dict[BlockHash, int]]]] = {}

    def reset(self, instance: InstanceId, residents: Residents) -> None:
        self.drop(instance)
        self._admit(instance)
        for tier, blocks in residents.items():
            self.extend(instance, tier, blocks)

    def extend(
        self, instance: InstanceId, tier: CacheTier, blocks: Iterable[tuple[BlockHash, BlockHash | None]]
    ) -> None:
        tier = CacheTier(tier)
        holder = self._by_instance.get(instance) or self._admit(instance)
        for block, parent in blocks:
            self._store(holder, block, parent, tier)

    def apply(self, instance: InstanceId, event: KvEvent) -> None:
        if self._retired:
            self._sweep(_SWEPT_PER_CALL)
        holder = self._by_instance.get(instance) or self._admit(instance)
        match event:
            case BlockStored():
                parent = event.parent
                for block in event.block_hashes:
                    self._store(holder, block, parent, event.tier)
                    parent = block
            case BlockRemoved():
                for block in event.block_hashes:
                    self._remove(holder, block, TIER_BIT[event.tier])
            case AllBlocksCleared():
                self.drop(instance)
                self._admit(instance)

    def drop(self, instance: InstanceId) -> None:
        holder = self._by_instance.pop(instance, None)
        if holder is not None:
            del self._names[holder.bit]
            self._live ^= holder.bit
            self._ragged &= ~holder.bit
            self._tiered &= ~holder.bit
            self._named.clear()
            self._retired.append(holder)
        if self._retired:
            self._sweep(_SWEPT_PER_CALL)

    def sweep(self) -> Iterator[None]:
        """Take all that lost instances held out of the tables; yields after each half a millisecond of work."""
        while self._retired:
            self._sweep(_SWEPT_PER_TURN)
            yield

    def match(self, hashes: Sequence[BlockHash]) -> Mapping[InstanceId, PrefixMatch]:
        if self._retired:
            self._sweep(_SWEPT_PER_CALL)
        if not hashes:
            return {}
        first = self._holders.get(hashes[0], 0) & self._live
        return Matches(self._by_instance, self._names, hashes, self._stops(hashes, first)) if first else {}

    def runs(self, hashes: Sequence[BlockHash]) -> list[Run]:
        """Return the result of ``match`` grouped by equal numbers of blocks, HBM only."""
        if self._retired:
            self._sweep(_SWEPT_PER_CALL)
        first = self._holders.get(hashes[0], 0) & self._live if hashes else 0
        if not first:
            return []
        runs: list[Run] = []
        for bits, blocks in self._stops(hashes, first):
            tiered = bits & self._tiered
            for place in self._slower(tiered, hashes, blocks) if tiered else ():
                bits ^= 1 << place  # noqa: PLW2901 - the others
                name = self._names[1 << place]
                runs.append((blocks, split(self._by_instance[name].held, hashes, blocks).by_tier, (name,)))
            if bits:
                names, _ = self._named.get(bits) or self._name(bits)
                runs.append((blocks, {CacheTier.HBM: blocks}, names))
        return runs

    def lineage(self, block: BlockHash) -> list[BlockHash]:
        """Return a block with all that comes before it, in prompt order, as far as anybody holds it; empty where nobody
        holds the block. O(blocks before it).
        """
        path: dict[BlockHash, None] = {}
        known: BlockHash | None = block
        while known is not None and known not in path and self._holders.get(known, 0) & self._live:
            path[known] = None
            known = self._parent[known]
        return list(path)[::-1]

    def is_continued(self, instance: InstanceId, block: BlockHash) -> bool:
        """Return whether an instance holds a block that comes after this one: a prompt that goes on otherwise parts
        here from one that was there before. O(1).
        """
        holder = self._by_instance.get(instance)
        return holder is not None and holder.held.get(block, 0) >= ONE_CHILD

    def blocks_held(self, instance: InstanceId) -> Mapping[CacheTier, int]:
        holder = self._by_instance.get(instance)
        if holder is None:
            return {}
        return {tier: blocks for tier, blocks in zip(TIERS, holder.blocks_in, strict=True) if blocks}

    def is_ragged(self, instance: InstanceId) -> bool:
        """Return whether an instance has to be matched by walking (see the module's text)."""
        holder = self._by_instance.get(instance)
        return holder is not None and bool(self._ragged & holder.bit)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the tables contradict each other. O(everything)."""
        holders: dict[BlockHash, int] = {}
        for holder in self._retired:
            for block in holder.held:
                holders[block] = holders.get(block, 0) | holder.bit
        for holder in self._by_instance.values():
            counts = [0] * len(TIERS)
            children: dict[BlockHash, int] = {}
            for block, value in holder.held.items():
                holders[block] = holders.get(block, 0) | holder.bit
                for place, tier in enumerate(TIERS):
                    counts[place] += bool(value & TIER_BIT[tier])
                if (parent := holder.own_parents.get(block, self._parent[block])) is not None:
                    children[parent] = children.get(parent, 0) + 1
            must(counts == holder.blocks_in, "an instance's block counts are wrong")
            must(holder.own_parents.keys() <= holder.held.keys(), "a parent is kept for a block that is not held")
            for block, value in holder.held.items():
                must(value // ONE_CHILD == children.pop(block, 0), "a block's children are miscounted")
            must(children == holder.holes, "an instance's holes are miscounted")
            must(bool(self._ragged & holder.bit) == bool(children), "ragged instances are not exactly those with holes")
            must(bool(self._tiered & holder.bit) or not any(counts[1:]), "one holds blocks outside of HBM unnoticed")
        bits = [holder.bit for holder in (*self._by_instance.values(), *self._retired)]
        bits += [1 << place for place in self._free_places]
        must(sorted(bits) == [1 << place for place in range(self._places)], "places are lost or used twice")
        must(self._live == sum(each.bit for each in self._by_instance.values()), "the count of live instances is wrong")
        must(self._names == {each.bit: name for name, each in self._by_instance.items()}, "places have wrong names")
        must(
            all(
                names == tuple(map(self._names.get, bits_of(mask)))
                and all(map(is_, held, [self._by_instance[name].held for name in names]))
                for mask, (names, held) in self._named.items()
            ),
            "what is kept of a mask is others'",
        )
        must(holders == self._holders, "the masks differ from what the instances hold")
        must(self._parent.keys() == holders.keys(), "parents are kept for other blocks than those held")

    def _name(self, mask: int) -> tuple[tuple[InstanceId, ...], list[dict[BlockHash, int]]]:
        """Return and cache the instances of a mask and their blocks."""
        if len(self._named) >= _MAX_NAMED_MASKS:
            self._named.clear()
        names = tuple([self._names[bit] for bit in bits_of(mask)])
        named = self._named[mask] = (names, [self._by_instance[name].held for name in names])
        return named

    def _slower(self, mask: int, hashes: Sequence[BlockHash], blocks: int) -> list[int]:
        """Return the places of those for whom ``split`` would find more than HBM. What it looks at as long as it finds
        nothing else are the same blocks for all.
        """
        _, all_held = self._named.get(mask) or self._name(mask)
        slower: list[int] = []
        low = 0
        while low < blocks and mask:
            middle = (low + blocks) // 2
            block = hashes[middle]
            if not all(map(and_, map(dict.get, all_held, repeat(block), repeat(0)), repeat(_HBM_BIT))):
                found = [
                    bit for bit, held in zip(bits_of(mask), all_held, strict=True) if not held.get(block, 0) & _HBM_BIT
                ]
                slower += [bit.bit_length() - 1 for bit in found]
                mask ^= sum(found)
                all_held = [held for held in all_held if held.get(block, 0) & _HBM_BIT]
            low = middle + 1
        return slower

    def _stops(self, hashes: Sequence[BlockHash], first: int) -> list[tuple[int, int]]:
        """Return, for all holders of the first block, their bits and their number of leading blocks."""
        stops: list[tuple[int, int]] = []
        get = self._holders.get
        end = len(hashes)
        closed = first & ~self._ragged
        if whole := closed & get(hashes[-1], 0):
            stops.append((whole, end))
            closed ^= whole
        low = 0
        while closed:  # all of them hold `low`, and none of them the last
            high, at_high = end - 1, 0
            while high - low > 1:  # all hold `low`; of those that hold `high` one or more are missing
                middle = (low + high) // 2
                at_middle = get(hashes[middle], 0) & closed
                if at_middle == closed:
                    low = middle
                else:
                    high, at_high = middle, at_middle
            stops.append((closed ^ at_high, high))
            low, closed = high, at_high
        walking = first & self._ragged
        for place, block in enumerate(hashes if walking else ()):
            on = walking & get(block, 0)
            if stopping := walking ^ on:
                stops.append((stopping, place))
            walking = on
            if not on:
                return stops
        if walking:
            stops.append((walking, end))
        return stops

    def _store(self, holder: Holder, block: BlockHash, parent: BlockHash | None, tier: CacheTier) -> None:
        if type(block) is not bytes or (parent is not None and type(parent) is not bytes):
            raise TypeError(f"block {block!r:.80} with parent {parent!r:.80}: names are bytes")
        tier_bit = TIER_BIT[tier]
        held = holder.held
        if self._retired:
            self._sweep(_SWEPT_PER_STORE)
        value = held.get(block, 0)
        if value & tier_bit:
            return
        holder.blocks_in[tier_bit.bit_length() - 1] += 1
        if tier_bit != _HBM_BIT:
            self._tiered |= holder.bit
        held[block] = value | tier_bit
        if value:
            return
        self._mark(block, holder.bit)
        if holder.holes and block in holder.holes:
            held[block] += holder.holes.pop(block) * ONE_CHILD
            self._check(holder)
        if self._parent.setdefault(block, parent) != parent:
            holder.own_parents[block] = parent
        if parent is None:
            return
        above = held.get(parent)
        if above is None:
            holder.holes[parent] = holder.holes.get(parent, 0) + 1
            self._check(holder)
        else:
            held[parent] = above + ONE_CHILD

    def _remove(self, holder: Holder, block: BlockHash, tier_bit: int) -> None:
        held = holder.held
        value = held.get(block, 0)
        if not value & tier_bit:
            return
        holder.blocks_in[tier_bit.bit_length() - 1] -= 1
        if tier_bit != _HBM_BIT and not any(holder.blocks_in[1:]):
            self._tiered &= ~holder.bit
        value ^= tier_bit
        if value & _ANY_TIER:
            held[block] = value
            return
        del held[block]
        parent = self._parent[block]
        if holder.own_parents and block in holder.own_parents:
            parent = holder.own_parents.pop(block)
        if value:  # it has children left
            holder.holes[block] = value // ONE_CHILD
        if parent is not None:
            above = held.get(parent)
            if above is not None:
                held[parent] = above - ONE_CHILD
            elif holder.holes[parent] > 1:
                holder.holes[parent] -= 1
            else:
                del holder.holes[parent]
        if value or self._ragged & holder.bit:
            self._check(holder)
        self._unmark(block, holder.bit)

    def _check(self, holder: Holder) -> None:
        if holder.holes:
            self._ragged |= holder.bit
        else:
            self._ragged &= ~holder.bit

    def _sweep(self, blocks: int) -> None:
        """Take a few blocks of retired holders out of the tables: more than one for each block that is stored.

        Empty ones go at once, so that clearing what is empty already uses nothing up.
        """
        left = blocks
        while self._retired:
            holder = self._retired[0]
            while holder.held and left:
                block, _ = holder.held.popitem()
                self._unmark(block, holder.bit)
                left -= 1
            if holder.held:
                return
            self._retired.popleft()
            self._free_places.append(holder.bit.bit_length() - 1)

    def _mark(self, block: BlockHash, bit: int) -> None:
        mask = self._holders.get(block, 0) | bit
        if len(self._masks) > _MAX_SHARED_MASKS:
            self._masks.clear()
        self._holders[block] = self._masks.setdefault(mask, mask)

    def _unmark(self, block: BlockHash, bit: int) -> None:
        mask = self._holders[block] & ~bit
        if mask:
            self._holders[block] = self._masks.setdefault(mask, mask)
        else:
            del self._holders[block], self._parent[block]

    def _admit(self, instance: InstanceId) -> Holder:
        if self._free_places:
            place = self._free_places.pop()
        else:
            place = self._places
            self._places += 1
        holder = self._by_instance[instance] = Holder(1 << place)
        self._names[holder.bit] = instance
        self._live |= holder.bit
        return holder
