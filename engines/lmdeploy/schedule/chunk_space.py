"""A long prompt's next chunk that finds no room: blocks that were loaded for prompts that wait give way to it.

LMDeploy never takes blocks from a prompt whose KV was loaded and that waits to be computed, and computes the chunks of
one long prompt at a time. So a long prompt that has no room for its next chunk, and a loaded one that waits for its
end, would wait for each other for ever. While answers run there is no need: they end, or give up their own blocks.
Once none runs the loaded prompts give up theirs, the youngest first, until the chunk has room. The prompt whose chunks
are computed goes on to its end, so nobody takes turns with it; the others keep their place, and are loaded again.
"""

import logging
from collections.abc import Callable
from typing import Any

from engines.control.guard import Guard
from engines.lmdeploy.schedule.step_watch import answering

_log = logging.getLogger(__name__)


def task_try_active_chunk(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """``_ForwardInputsTask._try_active_chunk``: again, with more room, until no loaded prompt has any to give."""
    guard = Guard("the room of chunks")

    def _try_active_chunk(self: Any) -> None:
        original(self)
        while self.state.active_chunk_blocked_by_kv and guard("make room", False, _free_blocks, self):  # noqa: FBT003
            original(self)

    return _try_active_chunk


def _free_blocks(task: Any) -> bool:
    """Take the blocks from the youngest loaded prompt that waits, if no answer runs; return whether there was one."""
    if answering(task.maker):
        return False
    scheduler = task.scheduler
    loads = scheduler.kv_load_coordinator
    loaded = [seq for seq in scheduler.waiting if loads.is_remote_ready(seq)]
    if not loaded:
        return False
    youngest = max(loaded, key=lambda seq: seq.arrive_time)
    blocks = int(youngest.num_blocks)
    loads.release_tracking(youngest)  # it can be evicted from here on
    scheduler.eviction_helper._reclaim_candidate(youngest)  # noqa: SLF001
    _log.info("a chunk found no room: %d loaded blocks of request %d give way", blocks, youngest.seq_id)
    return True
