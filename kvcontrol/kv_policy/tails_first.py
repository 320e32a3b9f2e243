"""Any policy, restricted to evict tails before heads: the interface for owners of prefix-chained blocks.

A block is of no use without those before it, so a head must stay while any tail of it is there. LRU, LFU and MQ keep to
that where paths are used as wholes; FIFO, ARC, S3-FIFO and LRU-2 are defined by more than the last use and don't. Here
the owner says with each block whose content comes before it, and for every content the number of resident blocks that
follow on it is kept. What the policy chooses goes if nothing follows on it. A head with tails is set *aside*: the
policy has forgotten it (its turn had come), it stays resident, and it is

    the next to go           as soon as its last tail has gone,
    inserted anew            as soon as it is used or held again; the policy knows it by its key.

A block that the owner *keeps* for a while, whatever the policy says, stays in the same way: what keeps it counts as a
tail of it, and does not count as a use.

So the victim is the first in the policy's order that has no tails, and each block is set aside at most once for each
time that it came, was used or was held: O(1) amortised a block, no scan, no walk down to a leaf. Links are by content,
not by place: a head that was lost (a broken copy) and comes again has its tails at once. Rejected: walking from a
chosen head to its deepest tail (a chat is thousands of blocks deep, on every victim), and holding all heads in the
policy (a hold ends as a use, so every head would be young when its last tail goes).
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvcontrol.core.ids import BlockId
from kvcontrol.core.integrity import must
from kvcontrol.kv_policy.allowed import check_keys, check_whole
from kvcontrol.kv_policy.eviction import ContentKey, EvictionDecision, EvictionPolicy, PolicyContext
from kvcontrol.kv_policy.succession import Link, Succession


class TailsFirst:
    """An ``EvictionPolicy`` about a forest of blocks around an empty ``policy`` that need not know of it.

    Paths are as in ``EvictionPolicy``; only ``insert`` is told more. A held block's heads must be held too, or may be
    chosen like any other once it has left. ``select_victims`` returns fewer than wanted only when every other block is
    held or has a held one after it.
    """

    tails_first = True

    def __init__(self, policy: EvictionPolicy) -> None:
        if len(policy):
            raise ValueError(f"a policy begins empty, {policy.name} knows {len(policy)} blocks")
        self._take_over(policy, OrderedDict(), {}, {})

    def _take_over(
        self,
        policy: EvictionPolicy,
        links: OrderedDict[BlockId, Link],
        tails: dict[ContentKey, int],
        kept: dict[ContentKey, int],
    ) -> None:
        self.policy = policy
        self._links = links
        """In the order of their last uses, whatever the policy's own order is: for a successor."""
        self._tails = tails
        """How many resident blocks follow on a content, and how often it is kept; absent is none."""
        self._kept = kept
        """How often each content is kept."""
        self._aside: dict[ContentKey, list[BlockId]] = {}
        """Chosen heads with tails, by their content (mostly one, but nothing forbids two blocks of one content)."""
        self._set_aside: set[BlockId] = set()
        """All that the policy has forgotten and that is still here: in ``_aside`` or ``_next``."""
        self._next: dict[BlockId, None] = {}
        """Of those, heads whose last tail has gone."""
        self._succession: Succession | None = None

    def __len__(self) -> int:
        return len(self._links)

    @property
    def name(self) -> str:
        """The policy's own name."""
        return self.policy.name

    @property
    def keeps(self) -> bool:
        """Whether anything is kept, resident or not."""
        return bool(self._kept)

    @property
    def aside_blocks(self) -> int:
        """Heads that were chosen as victims and stay because of their tails."""
        return len(self._set_aside)

    @property
    def follows_prompts(self) -> bool:
        """Whether the policy does."""
        return self.policy.follows_prompts

    @property
    def counts_uses(self) -> bool:
        """Whether the policy does."""
        return self.policy.counts_uses

    def parent_of(self, block: BlockId) -> ContentKey | None:
        """Return the parent of a resident block."""
        return self._links[block][1]

    def requested(self, prompt: Sequence[ContentKey], *, block_tokens: int, prompt_tokens: int) -> None:
        """Follow a prompt that came, before anything of it is used."""
        self.policy.requested(prompt, block_tokens=block_tokens, prompt_tokens=prompt_tokens)

    def insert(self, path: Sequence[BlockId], keys: Sequence[ContentKey], parents: Sequence[ContentKey | None]) -> None:
        """Follow blocks that became resident, heads before tails, each with its content and its parent's.

        ``ValueError`` for one that is resident already or named twice, or where the numbers differ.
        """
        if not len(path) == len(keys) == len(parents):
            raise ValueError(f"{len(path)} blocks are inserted with {len(keys)} keys and {len(parents)} parents")
        links, tails = self._links, self._tails
        if not links.keys().isdisjoint(path):
            raise ValueError(f"block {next(block for block in path if block in links)} is resident already")
        check_keys(parents)
        self.policy.insert(path, keys)
        for block, key, parent in zip(reversed(path), reversed(keys), reversed(parents), strict=True):
            links[block] = (key, parent)
            if parent is not None:
                tails[parent] = tails.get(parent, 0) + 1
        if self._succession is not None:
            self._succession.used(path)

    def access(self, path: Sequence[BlockId]) -> None:
        """Follow a use of resident blocks."""
        if self._set_aside and (back := self._back(path)):
            self._check(path)
            known = [block for block in path if block not in back]
            self.policy.access(known)
            self._insert_anew(back)  # which is their use
        else:
            self.policy.access(path)
        self._used(path)

    def hold(self, path: Sequence[BlockId]) -> None:
        """Keep blocks from being chosen until as many ``release``."""
        if self._set_aside and (back := self._back(path)):
            self._check(path)
            self._insert_anew(back)
        self.policy.hold(path)

    def release(self, path: Sequence[BlockId]) -> None:
        """Undo one ``hold``; see ``EvictionPolicy``."""
        if self._set_aside and (back := self._back(path)):
            raise ValueError(f"block {back[0]} is not held")
        self.policy.release(path)
        self._used(path)

    def remove(self, path: Sequence[BlockId]) -> None:
        """Follow blocks that left for another reason than this policy's choice; held ones too."""
        back = self._back(path) if self._set_aside else ()
        if back:
            self._check(path)
            self.policy.remove([block for block in path if block not in back])
            for block in back:
                self._take_back(block)
        else:
            self.policy.remove(path)
        for block in path:
            self._unlink(block)

    def keep(self, key: ContentKey) -> None:
        """Let no block of this content be chosen until as many ``let_go``; it need not be resident. No use of it."""
        self._kept[key] = self._kept.get(key, 0) + 1
        self._tails[key] = self._tails.get(key, 0) + 1

    def let_go(self, key: ContentKey) -> None:
        """Undo one ``keep``; a block chosen meanwhile is the next victim. ``ValueError`` if it isn't kept."""
        times = self._kept.get(key)
        if times is None:
            raise ValueError("a content is let go that is not kept")
        if times == 1:
            del self._kept[key]
        else:
            self._kept[key] = times - 1
        self._loosen(key)

    def select_victims(self, context: PolicyContext) -> EvictionDecision:
        """Choose up to ``context.wanted_blocks``, none with a tail here and none that is kept; they are removed."""
        wanted = context.wanted_blocks
        if type(wanted) is not int or wanted < 0:
            check_whole("wanted_blocks", wanted)
        victims: list[BlockId] = []
        reason = ""
        tails, links, coming = self._tails, self._links, self._next
        while (missing := wanted - len(victims)) > 0:
            if coming:
                block = next(iter(coming))
                del coming[block]
                if tails.get(links[block][0]):  # it has got a new tail meanwhile
                    self._aside.setdefault(links[block][0], []).append(block)
                else:
                    self._set_aside.discard(block)
                    victims.append(block)
                    self._unlink(block)
                continue
            part = context
            if victims or len(context.incoming) > missing:
                part = context._replace(wanted_blocks=missing, incoming=context.incoming[len(victims) :])
            decision = self.policy.select_victims(part)
            reason = decision.reason
            if not decision.victims:
                break
            if len(decision.victims) > missing:
                raise ValueError(f"{self.name} chose {len(decision.victims)} blocks of {missing} wanted")
            for block in decision.victims:
                key = links[block][0]
                if tails.get(key):
                    self._aside.setdefault(key, []).append(block)
                    self._set_aside.add(block)
                else:
                    victims.append(block)
                    self._unlink(block)
        return EvictionDecision(
            victims=tuple(victims), reason=reason or f"{self.name}: its turn had come, and its last tail has gone"
        )

    def begin_hand_over(self, policy: EvictionPolicy) -> None:
        """Begin a succession by an empty ``policy``; ``continue_hand_over`` reports all blocks to it.

        Another one that had begun is given up. Nothing changes for whoever asks this one. ``ValueError`` when the
        policy isn't empty.
        """
        self._succession = Succession(policy, self._links)

    @property
    def has_successor(self) -> bool:
        """Whether a hand-over has begun and hasn't been given up."""
        return self._succession is not None

    def continue_hand_over(self, blocks: int) -> int:
        """Report up to so many more blocks to the successor, and return how many are missing. O(``blocks``).

        When it raises, the hand-over has been given up.
        """
        check_whole("blocks", blocks)
        succession = self._succession
        if succession is None:
            raise ValueError("no hand-over has begun, or it was given up")
        self._succession = None
        succession.advance(blocks)
        self._succession = succession
        return succession.missing

    def end_hand_over(self, held: Iterable[BlockId]) -> "TailsFirst":
        """Return the successor with all blocks, least recently used first, and the held ones. O(missing + held).

        This one must not be used any more after that, unless it raises: then the hand-over has been given up, and
        nothing has changed.
        """
        succession, self._succession = self._succession, None
        if succession is None:
            raise ValueError("no hand-over has begun, or it was given up")
        heir = TailsFirst.__new__(TailsFirst)
        heir._take_over(succession.end(held), self._links, self._tails, self._kept)  # noqa: SLF001 - of its own kind
        return heir

    def hand_over(self, policy: EvictionPolicy, held: Iterable[BlockId]) -> "TailsFirst":
        """Do all of it at once; O(blocks)."""
        self.begin_hand_over(policy)
        return self.end_hand_over(held)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the parts contradict each other. O(blocks)."""
        tails = dict(self._kept)
        for _, parent in self._links.values():
            if parent is not None:
                tails[parent] = tails.get(parent, 0) + 1
        must(tails == self._tails, "tails are counted wrongly")
        must(len(self.policy) + len(self._set_aside) == len(self._links), "the policy knows other blocks")
        waiting = {block for blocks in self._aside.values() for block in blocks}
        must(waiting | self._next.keys() == self._set_aside, "a block aside is in no list, or in one too many")
        must(not waiting & self._next.keys(), "a block aside is in two lists")
        must(all(tails.get(key) for key in self._aside), "a block without tails stays aside")
        if self._succession is not None:
            self._succession.check_integrity()

    def _used(self, path: Sequence[BlockId]) -> None:
        move_to_end = self._links.move_to_end
        for block in reversed(path):
            move_to_end(block)
        if self._succession is not None:
            self._succession.used(path)

    def _back(self, path: Sequence[BlockId]) -> Sequence[BlockId]:
        aside = self._set_aside
        return () if aside.isdisjoint(path) else [block for block in path if block in aside]

    def _check(self, path: Sequence[BlockId]) -> None:
        for block in path:
            if block not in self._links:
                raise KeyError(f"block {block} is not resident")
        if len(set(path)) != len(path):
            raise ValueError(f"a path names a block once: {list(path)}")

    def _insert_anew(self, path: Sequence[BlockId]) -> None:
        for block in path:
            self._take_back(block)
        self.policy.insert(path, [self._links[block][0] for block in path])

    def _take_back(self, block: BlockId) -> None:
        self._set_aside.remove(block)
        if block in self._next:
            del self._next[block]
            return
        key = self._links[block][0]
        waiting = self._aside[key]
        waiting.remove(block)
        if not waiting:
            del self._aside[key]

    def _unlink(self, block: BlockId) -> None:
        _, parent = self._links.pop(block)
        if self._succession is not None:
            self._succession.gone(block)
        if parent is not None:
            self._loosen(parent)

    def _loosen(self, key: ContentKey) -> None:
        """Follow the end of what kept a content's blocks here, one of perhaps many."""
        left = self._tails[key] - 1
        if left:
            self._tails[key] = left
            return
        del self._tails[key]
        for head in self._aside.pop(key, ()):
            self._next[head] = None
