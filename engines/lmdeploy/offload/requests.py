"""Calls of the connector's scheduler half for a request, from its arrival to its end."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from engines.control.guard import Guard
from engines.lmdeploy.offload.plan import OffloadPlanner
from engines.lmdeploy.offload.transfers import EngineTransfers
from engines.lmdeploy.trie.events import tracker_of
from engines.lmdeploy.trie.path import PathMaker
from engines.lmdeploy.trie.watchers import watchers_of

DEFER_START_S: Final = 0.05
"""Deferral of reports about blocks evicted for a load, until the load has begun."""
DEFER_FORWARD_S: Final = 0.15
"""Deferral of reports about loaded blocks, until their prompt's forward has been launched."""


class OffloadRequests:
    """One engine's requests and their blocks below HBM; without a planner, every answer is "nothing"."""

    def __init__(self, guard: Guard, paths: PathMaker, transfers: EngineTransfers) -> None:
        self._guard = guard
        self._paths = paths
        self._transfers = transfers
        self._planner: OffloadPlanner | None = None
        self._scheduler: Any = None

    def begin(self, planner: OffloadPlanner, scheduler: Any) -> None:
        """Plan for requests from now on."""
        self._planner, self._scheduler = planner, scheduler

    def arrived(self, seq: Any) -> None:
        """Note a new request."""
        if self._planner is not None:
            self._planner.arrived(seq)

    def external_tokens(self, seq: Any, computed_tokens: int) -> int | None:
        """Return how many tokens after the computed ones can be loaded; None: ask again."""
        tokens = 0 if self._planner is None else self._planner.external_tokens(seq, computed_tokens)
        if tokens and (tracker := tracker_of(self._scheduler.block_trie)) is not None:
            tracker.defer(DEFER_START_S)
        return tokens

    def lookup_cancelled(self, request_id: int) -> None:
        """A request is over before its blocks have come from elsewhere."""
        if self._planner is not None and self._planner.supply is not None:
            self._planner.supply.forget(request_id)

    def allocated(self, seq: Any, slots: Sequence[int]) -> None:
        """Never raises: LMDeploy has taken the blocks already. A load that can't be ordered is one that failed."""
        planner = self._planner
        last_block = 0 if planner is None else self._guard("bind a load", 0, planner.allocated, seq, slots)
        if last_block:
            self._guard("begin a path", None, lambda: self._paths.begin(self._scheduler.block_trie, seq, last_block))
        else:
            self._transfers.failed(int(seq.seq_id), map(int, slots))

    def ended(self, seq: Any) -> None:
        """A request is over, its blocks are still its own for the length of this call."""
        if self._planner is None:
            return
        slots: Sequence[int] = ()
        logical: Sequence[int] = ()
        if seq.num_blocks > 0:
            slots = self._scheduler.block_manager.get_block_table(seq)
            logical = seq.logical_blocks.get_real_blocks()
        self._planner.ended(seq, slots, logical)

    def loads_ended(self, request_ids: Iterable[int], invalid_slots: Iterable[int]) -> list[tuple[int, bool]]:
        """Return each load's end and whether it succeeded."""
        invalid = set(invalid_slots)
        if request_ids := sorted(request_ids):
            self._guard("defer reports", None, self._defer_watchers)
        return [(request_id, self._is_usable(request_id, invalid)) for request_id in request_ids]

    def saves_ended(self, save_ids: Iterable[int]) -> frozenset[int]:
        """Return the saves whose blocks LMDeploy may let go."""
        planner = self._planner
        return frozenset() if planner is None else frozenset(each for each in save_ids if planner.saved(each))

    def settle_watchers(self) -> None:
        """Let those who watch the block trie be told what waits for it."""
        for watcher in watchers_of(self._scheduler.block_trie):
            watcher.settle()

    def _defer_watchers(self) -> None:
        """Have them told of what a load brought after its prompt's forward has been launched."""
        for watcher in watchers_of(self._scheduler.block_trie):
            watcher.defer(DEFER_FORWARD_S)

    def _is_usable(self, request_id: int, invalid: set[int]) -> bool:
        self._paths.end(request_id)
        order = self._transfers.take_order(request_id)
        success = order is not None and (not invalid or invalid.isdisjoint(order.slots))
        planner = self._planner
        if planner is None:
            return False
        return self._guard("note a load's end", False, lambda: planner.loaded(request_id, success=success))  # noqa: FBT003
