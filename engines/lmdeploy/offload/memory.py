"""The lmdeploy back end: the KV pool of a running LMDeploy engine as a tier of kv_runtime.

LMDeploy frees its pool when it sleeps and makes another when it wakes, at other addresses. So this is a door that is
open while a pool is registered; moves while it is closed fail, which the runtime takes as misses.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_runtime import BlockStatus, Fence, HostArena, Move
from kvcontrol.kv_runtime.backends.torch import TorchBackend

LEAVE_WITHIN_S = 30.0
"""How long a pool that goes is kept for moves that still use it."""

_log = logging.getLogger(__name__)


class EngineMemory:
    """A ``KVBackendProtocol`` over whatever pool is registered now; any thread.

    ``block_bytes`` and ``capacity_blocks`` are those of the first pool; a later one of another shape is refused with
    ``ValueError``, as what lies below HBM would no longer fit.
    """

    def __init__(self, rows: Mapping[str, Any], *, pages_per_block: int) -> None:
        self.tier = CacheTier.HBM
        self.last_error = ""
        self._pages = pages_per_block
        self._pool: TorchBackend | None = TorchBackend(rows, pages=pages_per_block)
        self._moving = 0
        self._moves_changed = threading.Condition()
        self.block_bytes = self._pool.block_bytes
        self.capacity_blocks = self._pool.capacity_blocks
        self.layout = ";".join(f"{name}:{row.dtype}:{tuple(row.shape[1:])}" for name, row in rows.items())
        """How a block's bytes are put together, as text: equal texts, interchangeable blocks."""

    def pin(self, arena: HostArena) -> None:
        """Prepare an arena for fast transfers with the engine's device."""
        if self._pool is not None:
            self._pool.pin(arena)

    def register(self, rows: Mapping[str, Any]) -> None:
        """Open the door to another pool."""
        pool = TorchBackend(rows, pages=self._pages)
        if (pool.block_bytes, pool.capacity_blocks) != (self.block_bytes, self.capacity_blocks):
            raise ValueError(
                f"the engine's new KV pool has {pool.capacity_blocks} blocks of {pool.block_bytes} bytes; "
                f"the runtime was built for {self.capacity_blocks} of {self.block_bytes}"
            )
        with self._moves_changed:
            self._pool = pool

    def unregister(self, within_s: float = LEAVE_WITHIN_S) -> bool:
        """Close the door, and return once no move uses the pool any more; False if one still does after ``within_s``.

        Moves that come later fail. Better is not to have any: ``HierarchyManager.drain``.
        """
        with self._moves_changed:
            pool, self._pool = self._pool, None
            left = self._moves_changed.wait_for(lambda: not self._moving, within_s)
        if not left:
            _log.error("block transfers still use the engine's KV pool %.1f s after it was to go", within_s)
        elif pool is not None:
            pool.close()
        return left

    def fence(self, *, grace_s: float = 0.0) -> Fence | None:
        """Return the moment at which all that the engine has queued until now will be done; None while closed."""
        pool = self._pool
        return None if pool is None else pool.fence(grace_s=grace_s)

    def read(self, moves: Sequence[Move], arena: HostArena) -> list[BlockStatus]:
        """See ``KVBackendProtocol``."""
        with self._through() as pool:
            return self._closed(moves) if pool is None else self._checked(pool, pool.read(moves, arena))

    def write(self, moves: Sequence[Move], arena: HostArena) -> list[BlockStatus]:
        """See ``KVBackendProtocol``."""
        with self._through() as pool:
            return self._closed(moves) if pool is None else self._checked(pool, pool.write(moves, arena))

    def write_in_order(self, moves: Sequence[Move], arena: HostArena, queued: Callable[[], None]) -> list[BlockStatus]:
        """See ``OrderedBackendProtocol``."""
        with self._through() as pool:
            if pool is None:
                return self._closed(moves)
            return self._checked(pool, pool.write_in_order(moves, arena, queued))

    def join(self) -> None:
        """See ``OrderedBackendProtocol``; nothing while closed."""
        pool = self._pool
        if pool is not None:
            pool.join()

    @contextmanager
    def _through(self) -> Iterator[TorchBackend | None]:
        """Keep the pool of this moment for the length of a block."""
        with self._moves_changed:
            pool = self._pool
            self._moving += pool is not None
        try:
            yield pool
        finally:
            if pool is not None:
                with self._moves_changed:
                    self._moving -= 1
                    self._moves_changed.notify_all()

    def _closed(self, moves: Sequence[Move]) -> list[BlockStatus]:
        self.last_error = "the engine has no KV pool now: it sleeps"
        return [BlockStatus.FAILED] * len(moves)

    def _checked(self, pool: TorchBackend, statuses: list[BlockStatus]) -> list[BlockStatus]:
        self.last_error = pool.last_error
        return statuses

    def close(self) -> None:
        """See ``KVBackendProtocol``."""
        self.unregister()
