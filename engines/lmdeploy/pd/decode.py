"""The decode instance's part: LMDeploy's migration loop, with every way that a transfer can fail ending in recompute.

LMDeploy 0.18 migrates one prompt after the other, without a bound on time, and its loop ends with the first failure;
the request then waits for ever, and so do all after it. Here every prompt is fetched by a task of its own, a few at a
time and each within ``pd_transfer_timeout_s``. One that can't be had (the peer is gone, refuses, is slow, sends other
tokens, another model or broken bytes) is computed here, as if nobody had prefilled it: slower, and the same answer.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from engines.lmdeploy.pd.backend import Delivery, current_delivery
from engines.lmdeploy.pd.peers import Peers
from engines.lmdeploy.pd.pools import engine_description
from engines.lmdeploy.pd.request import part_of
from engines.lmdeploy.pd.wire import RELEASED, TAKEN, Connection, Offer, TransferError, ask, expect
from engines.lmdeploy.settings import EngineSettings
from engines.lmdeploy.trie import first_match
from kvcontrol.core.blocks import CacheIdentity
from kvcontrol.core.hashing import root_hash, token_bytes
from kvcontrol.core.pd import Fetch, PdStats

MAX_TRANSFERS = 4
"""Prompts that are fetched at once: each lies in host memory as a whole before it is used."""
_FULL_POLL_S = 0.02
_LEAST_S = 0.001

_log = logging.getLogger("lmdeploy.kvgate")


class PdDecode:
    """Takes over prompts for one engine; everything but the waiting for bytes happens on the engine's thread."""

    def __init__(self, engine: Any, settings: EngineSettings, *, identity: Callable[[], CacheIdentity]) -> None:
        self._engine = engine
        self._identity = identity
        self._peers = Peers(settings.pd_networks)
        self._timeout_s = settings.pd_transfer_timeout_s
        self._places = asyncio.Semaphore(MAX_TRANSFERS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._links: dict[str, str] = {}
        self.fetched = 0
        self.fetched_bytes = 0
        self.transfer_s = 0.0
        self.recomputed: Counter[str] = Counter()

    def stats(self) -> PdStats:
        """Return totals; any thread, values may be a step apart."""
        return PdStats(
            fetched=self.fetched,
            fetched_bytes=self.fetched_bytes,
            recomputed=dict(self.recomputed),
            transfer_s=self.transfer_s,
        )

    def pool_gone(self) -> None:
        """Forget all links, which name addresses of the engine's KV pool: it gets another one."""
        self._links.clear()

    async def run(self, loop: Any) -> None:
        """LMDeploy's ``EngineLoop.migration_loop``, until its loop stops."""
        scheduler = loop.scheduler
        try:
            while not loop.stop_event.is_set():
                if loop._sleep_requested:  # noqa: SLF001
                    loop.migration_event.clear()
                    await self._settle()
                    loop._migration_sleep_drain_event.set()  # noqa: SLF001
                    await loop._sleep_resume_event.wait()  # noqa: SLF001
                    continue
                loop.migration_event.clear()
                for seq in scheduler.schedule_migration():
                    task = asyncio.create_task(self._take_over(loop, seq))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_FULL_POLL_S if scheduler.has_migration_waiting() else None):
                        await loop.migration_event.wait()
        finally:
            for task in self._tasks:
                task.cancel()

    async def _settle(self) -> None:
        """Wait for the transfers that are being made; each is bounded in time."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _take_over(self, loop: Any, seq: Any) -> None:
        """Fetch one prompt and let it go on, or let it be computed here."""
        fetch, began_s = part_of(seq.sampling_param), time.monotonic()
        try:
            if isinstance(fetch, Fetch):
                offer = await self._fetch(loop, seq, fetch)
            else:
                offer = None
                await loop._migration_loop_migrate([seq])  # noqa: SLF001  # LMDeploy's own proxy asked
        except Exception as error:  # noqa: BLE001  # whatever it is, it is this prompt's alone
            cause = error.cause if isinstance(error, TransferError) else "error"
            if _is_ready(self._engine, seq):
                self.recomputed[cause] += 1
                _log.warning("session[%s] is prefilled here (%s): %s", seq.session_id, cause, error)
                _compute_here(seq)
        else:
            if _is_ready(self._engine, seq):
                if offer is not None:
                    self.fetched += 1
                    self.fetched_bytes += offer.total_bytes
                    seq.migration_request.remote_token_id = offer.token_id
                    first_match.settle(seq, offer.cached_tokens)
                _go_on(loop, seq)
        self.transfer_s += time.monotonic() - began_s
        loop.has_runable_event.set()
        loop.migration_event.set()

    async def _fetch(self, loop: Any, seq: Any, fetch: Fetch) -> Offer:
        until_s = time.monotonic() + self._timeout_s
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._places.acquire()
        except TimeoutError as error:
            raise TransferError(
                "timeout", "the transfer queue was too long: earlier transfers took the time limit"
            ) from error
        try:
            running = asyncio.get_running_loop()
            connection: Connection = await running.run_in_executor(
                None,
                lambda: self._peers.connect(
                    fetch.host, fetch.port, timeout_s=max(_LEAST_S, until_s - time.monotonic())
                ),
            )
            with connection:
                offer = await running.run_in_executor(None, ask, connection, fetch.ticket)
                remote = self._link(fetch, offer)
                pairs = self._pairs(seq, offer)
                delivery = Delivery(
                    connection=connection,
                    total_bytes=offer.total_bytes,
                    wanted=lambda: _is_ready(self._engine, seq) and self._blocks(seq) == [mine for _, mine in pairs],
                )
                await _migrate(loop, remote, pairs, delivery)
                with suppress(TransferError):  # its lease ends all the same
                    await running.run_in_executor(None, _release, connection)
        finally:
            self._places.release()
        return offer

    def _pairs(self, seq: Any, offer: Offer) -> list[tuple[int, int]]:
        """Return remote and local block ids, place by place, once it is certain that they are of the same prompt."""
        if root_hash(offer.identity, adapter=offer.adapter) != root_hash(self._identity(), adapter=offer.adapter):
            raise TransferError(
                "identity", "the peer's blocks are of another model, configuration, precision or block size"
            )
        if offer.adapter != (seq.adapter_name or "") or not seq.history_multimodals.empty():
            raise TransferError("identity", "the peer's blocks are of another adapter, or hold more than text")
        if offer.tokens != token_bytes([int(token) for token in seq.valid_ids]):
            raise TransferError("tokens", "the peer's blocks are of another prompt")
        if not 0 <= offer.token_id < int(self._engine.model_config.vocab_size):
            raise TransferError("tokens", "the peer's first token is not in the model's vocabulary")
        local = self._blocks(seq)
        if len(offer.block_ids) != len(local):
            raise TransferError("layout", f"{len(offer.block_ids)} blocks are offered where {len(local)} are needed")
        return list(zip(offer.block_ids, local, strict=True))

    def _blocks(self, seq: Any) -> list[int]:
        return [int(block) for block in self._engine.scheduler.get_block_tables([seq])[0]]

    def _link(self, fetch: Fetch, offer: Offer) -> str:
        """Return LMDeploy's name of the link to a peer, which is made at the first transfer from its present life into
        the present KV pool.
        """
        if self._links.get(fetch.source) == offer.epoch:
            return fetch.source
        from lmdeploy.pytorch.disagg.config import DistServeEngineConfig
        from lmdeploy.pytorch.disagg.conn.protocol import (
            DistServeCachePoolInfo,
            DistServeInitRequest,
            DistServeKVTransferEndpointInfo,
            MigrationProtocol,
        )

        executor = self._engine.executor
        try:
            executor.p2p_initialize(
                DistServeInitRequest(
                    protocol=MigrationProtocol.TCP,
                    local_engine_id="",
                    local_engine_config=DistServeEngineConfig.model_validate(engine_description(self._engine)),
                    remote_engine_id=fetch.source,
                    remote_engine_config=DistServeEngineConfig.model_validate(offer.engine_config),
                )
            )
            executor.p2p_connect(
                fetch.source,
                [
                    DistServeKVTransferEndpointInfo(
                        protocol=MigrationProtocol.TCP,
                        endpoint_info="{}",
                        cache_pools=tuple(DistServeCachePoolInfo.model_validate(pool) for pool in offer.pools),
                    )
                ],
            )
        except (RuntimeError, ValueError) as error:
            raise TransferError("layout", f"the peer's pools don't fit: {error}") from error
        self._links[fetch.source] = offer.epoch
        return fetch.source


async def _migrate(loop: Any, remote: str, pairs: list[tuple[int, int]], delivery: Delivery) -> None:
    """Let LMDeploy plan the transfer and pass it to our back end (``backend.py``)."""
    from lmdeploy.pytorch.disagg.conn.protocol import MigrationProtocol
    from lmdeploy.pytorch.disagg.messages import MigrationExecutionBatch

    token = current_delivery.set(delivery)
    try:
        await loop.executor.migrate(MigrationExecutionBatch(protocol=MigrationProtocol.TCP, requests=[(remote, pairs)]))
    finally:
        current_delivery.reset(token)


def _release(connection: Connection) -> None:
    connection.send(TAKEN)
    expect(connection, RELEASED)


def _is_ready(engine: Any, seq: Any) -> bool:
    """Whether a sequence is still the one that its blocks were allocated for, waiting for them."""
    from lmdeploy.pytorch.messages import MessageStatus

    session = engine.scheduler.get_session(seq.session_id)
    return (
        session is not None and session.sequences.get(seq.seq_id) is seq and seq.status is MessageStatus.MIGRATION_READY
    )


def _compute_here(seq: Any) -> None:
    """Make a sequence that waits for its blocks one that waits for its prefill."""
    from lmdeploy.pytorch.paging.seq_states.states import WaitingState

    seq.migration_request = None
    seq.state.release_paging_resources()
    seq.state.to_state(WaitingState)


def _go_on(loop: Any, seq: Any) -> None:
    """Give the first token, which the peer made, and let the rest be decoded; or end there, as LMDeploy forgot to."""
    from lmdeploy.messages import RequestMetrics, ResponseType
    from lmdeploy.pytorch.engine.engine_loop import InferOutput
    from lmdeploy.pytorch.messages import UpdateTokenMode

    token = seq.migration_request.remote_token_id
    is_last = token in seq.sampling_param.stop_words or seq.sampling_param.max_new_tokens <= 1
    with loop.scheduler.seqs_migration_activation([seq]):
        seq.update_token_ids([token], mode=UpdateTokenMode.PREFILL)
        if is_last:
            seq.state.stop()
    seq.resp.type = ResponseType.SUCCESS
    output = InferOutput(
        session_id=seq.session_id,
        resp=seq.resp,
        finish=is_last,
        token_ids=seq.generated_ids,
        req_metrics=RequestMetrics(time.time(), seq.engine_events, cached_tokens=seq.cached_tokens),
    )
    loop.resp_queue.put_nowait({seq.session_id: output})
