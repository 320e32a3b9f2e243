"""Pauses of one engine's steps: every forward that was sent has ended and was answered, and none is sent meanwhile.

LMDeploy sends a forward ahead of the one that it waits for. Its own sleep forgets that forward: it goes on over memory
that is being freed, and its tokens become the answer of whichever request runs first after waking. Here the engine's
loop takes in all that it has sent before it reports that it stands still.

Weights change in such a pause. All KV that was computed with the old ones is given back then: the requests that hold
it are computed again, from their first token, and go on. Transfers to and from the tiers have ended before: in a pause
nothing moves blocks.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from engines.lmdeploy.offload.tiers import EngineTiers
from engines.lmdeploy.schedule.overlap import overlap_of

_POLL_S = 0.002


class StepPauses:
    """Pauses of one engine, one at a time; the engine's loop thread."""

    def __init__(self, engine: Any, tiers: EngineTiers | None) -> None:
        self._engine = engine
        self._tiers = tiers
        self.lock = asyncio.Lock()
        """Held by the operation that interrupts the engine's steps now."""

    @property
    def is_paused(self) -> bool:
        """Whether no forward is under way and none will be sent; so before the engine's loop has started, too."""
        loop = self._engine._engine_loop  # noqa: SLF001
        return loop is None or (loop._sleep_requested and loop._main_sleep_drain_event.is_set())  # noqa: SLF001

    @asynccontextmanager
    async def pause(self) -> AsyncIterator[None]:
        """Pause the engine within a block, after other pauses. A sleeping engine stays asleep."""
        async with self.lock:
            if self.is_paused:
                yield
                return
            loop = self._engine._engine_loop  # noqa: SLF001
            try:
                await self._end_transfers()
                await loop.drain_for_sleep()
                if (overlap := overlap_of(getattr(self._engine.executor, "model_agent", None))) is not None:
                    await overlap.settled()
                yield
            finally:
                loop.resume_from_sleep()
                if self._tiers is not None:
                    self._tiers.resume()

    async def _end_transfers(self) -> None:
        """Start no more loads and saves, and wait for those in flight; each is bounded in time."""
        scheduler, tiers = self._engine.scheduler, self._tiers
        if tiers is None:
            return
        tiers.suspend()
        while (  # noqa: ASYNC110 - it is the engine's own steps that bring it about
            not tiers.have_settled() or scheduler.has_remote_loading() or scheduler.kv_save_coordinator.has_pending()
        ):
            await asyncio.sleep(_POLL_S)


def compute_anew(engine: Any) -> None:
    """Take all KV from every request, in a pause: unfinished ones are computed again and continue.

    What is held for another instance stays until it is given up. Where the model runs in other processes, whose state
    of a step can't be reset from here, the requests are cancelled instead.
    """
    agent = getattr(engine.executor, "model_agent", None)
    if agent is None:
        engine._cancel_and_end_all_sessions()  # noqa: SLF001
        return
    from lmdeploy.pytorch.messages import MessageStatus

    scheduler = engine.scheduler
    for seq in list(scheduler.seq_manager.get_all_sequences()):
        match seq.status:
            case MessageStatus.TO_BE_MIGRATED | MessageStatus.WAITING_FOR_REMOTE_KVS:
                continue
            case MessageStatus.READY | MessageStatus.RUNNING:
                scheduler.preempt_seqs((seq,))
            case MessageStatus.MIGRATION_READY:
                seq.state.evict()
            case MessageStatus.MIGRATION_DONE:
                seq.state.activate()
        scheduler.kv_load_coordinator.release_tracking(seq)
        scheduler.eviction_helper._reclaim_candidate(seq)  # noqa: SLF001
    if engine._engine_loop is not None:  # noqa: SLF001
        engine._engine_loop.reset_runtime_state()  # noqa: SLF001
        agent.reset_runtime_state()


# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def main_loop_get_outputs(original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """``EngineLoop._main_loop_get_outputs``: before a pause, also collect the outputs of steps sent ahead."""

    async def _main_loop_get_outputs(self: Any, running: Any, forward_inputs: Any) -> Any:
        ahead, next_running = await original(self, running, forward_inputs)
        while self._sleep_requested and next_running is not None:
            self.inputs_maker.preempt_invalid_decode_seqs()
            self.scheduler.activate_seqs(next_running)
            ahead, next_running = await original(self, next_running, ahead)
        return ahead, next_running

    return _main_loop_get_outputs
