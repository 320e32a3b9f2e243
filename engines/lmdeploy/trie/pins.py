"""Pinned blocks of LMDeploy's trie: the pins hold a reference to each, as a request would."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from engines.control.errors import RefusedError
from engines.control.pin_book import PinBook, PinRules, TakenOut
from engines.control.pin_ledger import PinLedger
from engines.lmdeploy.trie.events import evict_unused, hash_of
from engines.lmdeploy.trie.prefixes import find_nodes, path_above, take_out, with_what_follows
from engines.lmdeploy.trie.watchers import settle_watchers
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockHash
from kvcontrol.core.integrity import must
from kvcontrol.kv_runtime import HierarchyManager


class Below(Protocol):
    """What pins ask of the tiers below HBM."""

    @property
    def hierarchy(self) -> HierarchyManager | None:
        """The tiers, None before they were started."""

    def forget(self, keys: Collection[BlockHash] | None = None) -> dict[CacheTier, int]:
        """Drop blocks in all tiers, None for all, and return how many of each tier."""


class TrieMemory:
    """The trie's blocks as pins hold them: see ``PinnedMemory``. ``wanted`` are the blocks that pins have."""

    def __init__(self, scheduler: Any, wanted: Collection[BlockHash]) -> None:
        self._scheduler = scheduler
        self._trie = scheduler.block_trie
        self._wanted = wanted
        self._held: dict[BlockHash, Any] = {}
        """Nodes to whose blocks the pins have a reference."""
        self._doomed: dict[Any, set[BlockHash]] = {}
        """Nodes that are to be forgotten as soon as nobody uses them, and all that was ever seen to follow them."""

    @property
    def capacity_blocks(self) -> int:
        reserved = int(self._scheduler.cache_config.num_reserved_gpu_blocks)
        return int(self._scheduler.block_manager.num_gpu_blocks) - reserved

    @property
    def block_tokens(self) -> int:
        return int(self._trie.block_size)

    def check(self) -> None:
        if self._trie._use_checkpoints:  # noqa: SLF001
            raise RefusedError("this model keeps recurrent state, without which a pinned prefix would be of no use")

    def holds(self, key: BlockHash) -> bool:
        return key in self._held

    def above(self, key: BlockHash) -> Sequence[BlockHash] | None:
        node = find_nodes(self._trie, {key}).get(key)
        return None if node is None else path_above(node)

    def following(self, keys: Collection[BlockHash]) -> set[BlockHash]:
        return set(_hashes(with_what_follows(find_nodes(self._trie, set(keys)).values())))

    def hold(self, keys: Collection[BlockHash]) -> None:
        self.refer(find_nodes(self._trie, set(keys) - self._held.keys()).items())

    def release(self, keys: Collection[BlockHash]) -> None:
        nodes = [node for key in keys if (node := self._held.pop(key, None)) is not None]
        if nodes:
            self._scheduler.block_manager.release_logical_blocks(_blocks(nodes))

    def release_all(self) -> None:
        settle_watchers(self._trie)  # or pins would take references to new blocks just before their eviction
        self.release(list(self._held))

    def reset(self) -> int:
        return evict_unused(self._trie)

    def take_out(self, keys: Collection[BlockHash]) -> TakenOut:
        heads = set(find_nodes(self._trie, set(keys)).values())
        taken = TakenOut(*take_out(self._trie, heads))
        for node in heads:
            if node.is_attached() and node.parent not in heads:
                self._doomed.setdefault(node, set())
        return taken

    @property
    def has_doomed(self) -> bool:
        return bool(self._doomed)

    def pardon(self, keys: Collection[BlockHash] | None) -> None:
        if keys is None:
            self._doomed = {}
            return
        pinned = set(keys)
        for node in [node for node in self._doomed if hash_of(node) in pinned]:
            del self._doomed[node]

    def forget_doomed(self) -> set[BlockHash]:
        settle_watchers(self._trie)
        gone: set[BlockHash] = set()
        for node, followed in list(self._doomed.items()):
            followed.update(_hashes(with_what_follows((node,))))
            take_out(self._trie, (node,))
            if not node.is_attached():
                del self._doomed[node]
                gone |= followed
        return gone

    def check_integrity(self, wanted: Collection[BlockHash]) -> None:
        must(self._held.keys() <= set(wanted), "a reference is kept for a block that no pin has")
        must(find_nodes(self._trie, wanted) == self._held, "not the pinned blocks of HBM are held")

    def refer(self, found: Iterable[tuple[BlockHash, Any]]) -> None:
        """Take references to wanted blocks that the pins have none to yet."""
        fresh = {
            key: node for key, node in found if key in self._wanted and key not in self._held and node.is_attached()
        }
        if fresh:
            self._scheduler.block_manager.pin_logical_blocks(_blocks(fresh.values()))
            self._held |= fresh


class TriePins(PinBook):
    """The pins of one LMDeploy engine. ``share`` is that of each tier which may be pinned, ``longest_tokens`` the
    longest request's.
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
        ledger = PinLedger()
        self._wanted = ledger.wanted
        self._trie_memory = TrieMemory(scheduler, ledger.wanted)
        super().__init__(
            self._trie_memory,
            ledger,
            PinRules(
                share=share,
                setting="KVGATE_ENGINE_PIN_SHARE=",
                longest_blocks=-(-longest_tokens // self._trie_memory.block_tokens),
                option="--session-len",
            ),
            hierarchy=lambda: None if below is None else below.hierarchy,
            forget_below=lambda keys: {} if below is None else below.forget(keys),
            clock=clock,
        )

    def stored(self, nodes: Sequence[Any], keys: Sequence[BlockHash]) -> None:
        """Follow blocks that the trie has from now on. O(1) where nothing is pinned. Never raises."""
        if self._wanted:
            self.guard("hold new blocks", None, self._trie_memory.refer, zip(keys, nodes, strict=True))


def _hashes(nodes: Iterable[Any]) -> Iterator[BlockHash]:
    return (key for node in nodes if (key := hash_of(node)) is not None)


def _blocks(nodes: Iterable[Any]) -> "np.ndarray[Any, np.dtype[np.int64]]":
    return np.array([node.block_id for node in nodes], dtype=np.int64)
