"""Which blocks LMDeploy's trie gives up: an ``EvictionPolicy`` decides, told of every change and asked without a scan.

LMDeploy 0.18 looks at all of its trie's leaves on every eviction, orders them by a clock in whole seconds and lets
the addresses of Python objects decide within one second. Here the policy knows every block of the trie:

    a request's prefix match is accepted           requested, before its blocks are committed, and access after that
    a path of fresh nodes is committed             insert
    a second reference: a request, a save's lease  hold      (a block's first reference is the trie's own)
    the last of those is gone                      release
    the trie's reference goes in any other way     remove

so those that it may choose are the ones that only the trie holds, always, and choosing costs O(1) a victim. The order
is the policy's; that a node goes only as a leaf is ``TailsFirst``'s, which stands before any policy, and is checked
here once more, with the reference counts: a block that can't go after all is inserted anew.

While a request waits for its first token, reports to the policy may be deferred (``deferral.py``); the policy chooses
no victim before the deferred reports have reached it.

A ``TrieEviction`` belongs to one trie and to the engine's thread. Nothing here raises into the engine's loop: at the
first failure it is counted, logged, and LMDeploy's own eviction does the work from then on; the set of leaves and the
access times that it reads are kept right all the time. A model with recurrent state, whose checkpoints live and die
with trie nodes, has LMDeploy's own from the start.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from engines.lmdeploy.schedule.urgency import urgency_of_sequence
from engines.lmdeploy.trie.contents import content_above, content_of, prompt_contents, tenant_of
from engines.lmdeploy.trie.deferral import DeferringWatcher
from engines.lmdeploy.trie.shadow_feed import ShadowFeed
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.core.priority import Priority
from kvcontrol.kv_policy import (
    BlockKey,
    ContentKey,
    CostAwarePolicy,
    EvictionPolicy,
    PolicyContext,
    QosPolicy,
    TailsFirst,
)

EVICTION = "kvgate_eviction"

_STEP = "kvgate_step"
"""On a sequence: the last step that was reported to the policy."""
_MATCHED = "kvgate_matched"
"""On a sequence: the last step whose match was reported to the policy."""

_log = logging.getLogger(__name__)


class TrieEviction(DeferringWatcher):
    """Keeps one policy informed about one trie and carries out what it chooses."""

    def __init__(self, allocator: Any, policy: EvictionPolicy) -> None:
        super().__init__()
        self._allocator = allocator
        self._policy = TailsFirst(policy)
        self._nodes: dict[BlockId, Any] = {}
        blocks = allocator._log_mem.num_blocks()  # noqa: SLF001 - the allocator has no name for it
        self._resident = np.zeros(blocks, dtype=bool)
        self._held = np.zeros(blocks, dtype=bool)
        self.shadows = ShadowFeed()
        self._priority = 0
        """Of the request whose blocks are being attached, as ``BlockKey`` counts."""
        self.ways_back: Callable[[], tuple[float | None, float | None]] = _unknown
        """What getting a block back costs now: seconds of computing it and of loading it, None where nobody knows."""
        self.errors = 0
        self.evicted_blocks = 0

    @property
    def policy(self) -> EvictionPolicy:
        """The policy that decides now; ``swap`` another to replace it."""
        return self._policy.policy

    @property
    def resident_blocks(self) -> int:
        """How many blocks the trie holds, as the policy knows them."""
        return len(self._nodes)

    @property
    def failed(self) -> bool:
        """Whether LMDeploy's own eviction has taken over."""
        return self.errors > 0

    def swap(self, policy: EvictionPolicy) -> None:
        """Let an empty ``policy`` decide from now on: it is told of all blocks, the one used longest ago first.

        O(n). ``ValueError`` when it isn't empty, ``RuntimeError`` once LMDeploy's own eviction has taken over.
        The old policy stays in charge when anything raises.
        """
        self.begin_swap(policy)
        self.end_swap()

    def begin_swap(self, policy: EvictionPolicy) -> None:
        """Do as ``swap`` a part at a time: ``continue_swap``, and ``end_swap`` when few blocks are missing.

        The old policy goes on choosing until then, and another hand-over that had begun is given up.
        """
        self.settle_now()
        if self.failed:
            raise RuntimeError("LMDeploy's own eviction has taken over after an error")
        self._policy.begin_hand_over(policy)

    @property
    def has_successor(self) -> bool:
        """Whether a policy is being told of the blocks, to follow this one."""
        return self._policy.has_successor

    def continue_swap(self, blocks: int) -> int:
        """Tell the policy that is to follow of so many blocks more, and return how many are missing. O(``blocks``)."""
        return self._policy.continue_hand_over(blocks)

    def end_swap(self) -> None:
        """Put the policy that was to follow in charge: it is told of what is missing and of what is held."""
        self.settle_now()
        held = np.flatnonzero(self._held & self._resident)
        self._policy = self._policy.end_hand_over(list(map(BlockId, held.tolist())))

    def requested(self, trie: Any, sequence: Any) -> None:
        """Follow a prompt whose match was accepted, before what follows on the match is committed; the policy is told
        once, and of later calls for the same prompt (its further chunks, what it decodes) nothing. O(blocks) where the
        policy asks. Never raises.
        """
        self._priority = urgency_of_sequence(sequence).priority.level - Priority.LOW.level
        state = sequence.prefix_cache
        start = state.match_start_step
        if self.failed or start < 0 or state.suppress_match_stats or not self._policy.follows_prompts:
            return
        step = (start, sequence.input_end_pos)
        if getattr(sequence, _STEP, None) == step:
            return
        setattr(sequence, _STEP, step)
        try:
            contents = prompt_contents(trie, sequence)
        except Exception:  # noqa: BLE001  # the engine's loop dies of what escapes here
            self._fail("reading a prompt")
            return
        size = sequence.block_size
        self._report(
            "following a prompt",
            lambda: self._policy.requested(contents, block_tokens=size, prompt_tokens=size * len(contents)),
        )

    def committed(self, node: Any) -> None:
        """Follow what became reusable on the path that ends in ``node``; O(fresh nodes). Never raises."""
        priority = self._priority
        fresh = node
        while fresh.parent is not None and getattr(fresh, EVICTION, None) is not self:
            setattr(fresh, EVICTION, self)  # a match before their report is reported too
            fresh = fresh.parent
        self._report("following a new path", lambda: self._committed(node, priority))

    def references_changed(self, blocks: Any) -> None:
        """Follow the reference counts of ``blocks``, in prompt order; O(blocks). Never raises."""
        blocks = np.atleast_1d(blocks)
        if self._pending or self.deferral:
            if bool((self._allocator.get_ref_count(blocks) <= 0).any()):
                self.settle_now()  # before their numbers are reused for other blocks
            else:
                blocks = blocks.copy()  # the sequence may change its own list before the report
        self._report("following reference counts", lambda: self._references_changed(blocks))

    def matched(self, sequence: Any) -> None:
        """Follow the prefix that an accepted request begins with, once for a prompt: LMDeploy accepts a match for what
        was loaded, and once more for the prompt that goes on from there. Never raises.
        """
        state = sequence.prefix_cache
        start = state.match_start_step
        step = (start, sequence.input_end_pos)
        if start >= 0 and getattr(sequence, _MATCHED, None) == step:
            return
        setattr(sequence, _MATCHED, step)
        tail, size = state.trie_cursor, sequence.block_size
        if self.failed or start < 0:
            self.shadows.matched(tail)
            return
        path = sequence.logical_blocks.get_real_blocks()[start // size : sequence.num_history_ids // size].copy()
        self._report("following a match", lambda: self._matched(tail, path))

    def evict(self, leaves: set[Any], wanted_blocks: int) -> int:
        """Free up to ``wanted_blocks`` blocks of the trie and keep ``leaves`` right; fewer only when the rest is in use
        or ``failed`` became true. Returns how many. Never raises.
        """
        self.settle_now()
        freed: list[BlockId] = []
        try:
            self._evict(leaves, wanted_blocks, freed)
        except Exception:  # noqa: BLE001  # likewise
            self._fail("choosing victims")
        if freed:
            self._allocator.free(np.array(freed))
        self.evicted_blocks += len(freed)
        return len(freed)

    def check_integrity(self, trie: Any) -> None:
        """Raise ``AssertionError`` unless the policy knows what ``trie`` holds and who may go; O(n), for tests."""
        self.settle_now()
        reachable: dict[BlockId, Any] = {}
        waiting = list(trie._roots.values())  # noqa: SLF001
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            if node.parent is not None:
                reachable[node.block_id] = node
        _require(not self.failed, "LMDeploy's own eviction has taken over")
        _require(reachable == self._nodes, "not the trie's nodes")
        _require(set(np.flatnonzero(self._resident).tolist()) == reachable.keys(), "not the trie's blocks")
        _require(len(self._policy) == len(reachable), "the policy knows other blocks")
        self._policy.check_integrity()
        _require(trie.leaves == {node for node in reachable.values() if not node.children}, "not the trie's leaves")
        counts = self._allocator.get_ref_count(np.arange(len(self._resident)))
        _require(bool(np.array_equal(self._held, self._resident & (counts > 1))), "held are not those in use")

    def _report(self, what: str, report: Callable[[], None]) -> None:
        """Make a report now, or after the pending ones."""
        if self.failed:
            return

        def guarded() -> None:
            if self.failed:
                return
            try:
                report()
            except Exception:  # noqa: BLE001  # the engine's loop dies of what escapes here
                self._fail(what)

        if self._pending or self.deferral:
            self._pending.append(guarded)
            self.settle()
        else:
            guarded()

    def _committed(self, node: Any, priority: int) -> None:
        fresh: list[Any] = []
        while node.parent is not None and self._nodes.get(node.block_id) is not node:
            fresh.append(node)
            node = node.parent
        if fresh:
            self._insert(fresh[::-1], priority)
            self.shadows.committed(reversed(fresh))

    def _references_changed(self, blocks: "np.ndarray[Any, np.dtype[np.int64]]") -> None:
        ours = blocks[self._resident[blocks]]
        if len(ours):
            self._follow(ours)

    def _matched(self, tail: Any, path: "np.ndarray[Any, np.dtype[np.int64]]") -> None:
        self.shadows.matched(tail)
        if found := path[self._resident[path]].tolist():
            self._policy.access(found)

    def _evict(self, leaves: set[Any], wanted_blocks: int, freed: list[BlockId]) -> None:
        references = self._allocator.get_ref_count
        waiting: dict[BlockId, None] = {}  # chosen, not to be had yet
        while (missing := wanted_blocks - len(freed)) > 0 and (chosen := self._choose(missing, waiting)):
            for block in chosen:  # heads whose last tail goes join at its end
                if len(freed) == wanted_blocks:
                    break
                node = self._nodes[block]
                parent = node.parent
                if node.children or parent is None or references(block) != 1:
                    waiting[block] = None
                    continue
                self._detach(node, leaves)
                freed.append(block)
                waiting.pop(block, None)
                if parent.block_id in waiting and not parent.children:
                    chosen.append(parent.block_id)
        if waiting:
            self._insert([self._nodes[block] for block in reversed(waiting)], self._priority)

    def _choose(self, wanted_blocks: int, waiting: dict[BlockId, None]) -> list[BlockId]:
        capacity = int(self._allocator.cpu_mem_offset())
        free = int(self._allocator.get_phy_allocator("gpu").get_num_free_blocks())
        context = PolicyContext(
            tier=CacheTier.HBM, wanted_blocks=wanted_blocks, used_blocks=capacity - free, capacity_blocks=capacity
        )
        chosen = self._policy.select_victims(context).victims
        if len(chosen) > wanted_blocks:
            raise ValueError(f"{self._policy.name} chose {len(chosen)} blocks of {wanted_blocks} wanted")
        if again := waiting.keys() & chosen:
            raise ValueError(f"{self._policy.name} chose the evicted blocks {again} again")
        return list(chosen)

    def _detach(self, node: Any, leaves: set[Any]) -> None:
        parent = node.parent
        node.detach_leaf()
        self._forget(node.block_id)
        leaves.discard(node)
        if parent.parent is not None and not parent.children:
            leaves.add(parent)

    def _insert(self, path: Sequence[Any], priority: int) -> None:
        for node in path:
            known = self._nodes.setdefault(node.block_id, node)
            if known is not node:
                raise ValueError(f"block {node.block_id} belongs to two nodes")
        blocks = np.array([node.block_id for node in path])
        keys: list[ContentKey] = [content_of(node) for node in path]
        above = [content_above(node) for node in path]
        self._policy.insert(blocks.tolist(), self._described(keys, path, priority), above)
        self._resident[blocks] = True
        self._held[blocks] = False
        self._follow(blocks)

    def _described(self, keys: list[ContentKey], path: Sequence[Any], priority: int) -> list[ContentKey]:
        """Say more of blocks to the policies that ask for it: others need not pay for it."""
        match self._policy.name:
            case QosPolicy.name:
                return [
                    BlockKey(key, tenant=tenant_of(node), priority=priority)
                    for key, node in zip(keys, path, strict=True)
                ]
            case CostAwarePolicy.name:
                recompute_s, reload_s = self.ways_back()
                return [BlockKey(key, recompute_s=recompute_s, reload_s=reload_s) for key in keys]
            case _:
                return keys

    def _follow(self, blocks: "np.ndarray[Any, np.dtype[np.int64]]") -> None:
        counts = self._allocator.get_ref_count(blocks)
        used, held = counts > 1, self._held[blocks]
        if len(taken := blocks[used & ~held]):
            self._policy.hold(_once(taken))
            self._held[taken] = True
        if len(left := blocks[~used & held]):
            self._policy.release(_once(left))
            self._held[left] = False
        if len(gone := blocks[counts <= 0]):
            self._policy.remove(_once(gone))
            for block in _once(gone):
                self._forget(block)

    def _forget(self, block: BlockId) -> None:
        del self._nodes[block]
        self._resident[block] = False

    def _fail(self, what: str) -> None:
        self.errors += 1
        self._pending.clear()
        _log.exception("%s failed; LMDeploy's own eviction takes over from the %s policy", what, self._policy.name)
        self._nodes = {}


def eviction_of(trie: Any) -> TrieEviction | None:
    """Return what chooses a ``BlockTrie``'s victims, None when that is LMDeploy's own."""
    eviction: TrieEviction | None = getattr(trie.allocator, EVICTION, None)
    return eviction


def _unknown() -> tuple[float | None, float | None]:
    return None, None


def _once(blocks: "np.ndarray[Any, np.dtype[np.int64]]") -> list[BlockId]:
    return list(dict.fromkeys(blocks.tolist()))


def _require(holds: bool, otherwise: str) -> None:  # noqa: FBT001 - reads like an assertion, but `-O` leaves it in
    if not holds:
        raise AssertionError(otherwise)
