"""The prefill instance's part: LMDeploy's sessions as holds, their blocks as bytes, and the door to both."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from engines.control.calls import EngineBusyError
from engines.lmdeploy.engine_calls import EngineCalls
from engines.lmdeploy.pd.hand_over import hand_over
from engines.lmdeploy.pd.holds import Holds
from engines.lmdeploy.pd.peers import Peers
from engines.lmdeploy.pd.pools import engine_description, pool_descriptions, pools_of
from engines.lmdeploy.pd.server import PdServer
from engines.lmdeploy.pd.transport import endpoint_of
from engines.lmdeploy.pd.wire import Offer, TransferError
from engines.lmdeploy.settings import EngineSettings
from kvcontrol.core.blocks import CacheIdentity
from kvcontrol.core.hashing import token_bytes
from kvcontrol.core.pd import PdStats, Ticket

_CALL_S = 5.0
"""How long a thread of the door waits for the engine's."""


class PdPrefill:
    """Holds prompts and serves them until ``close``; the engine's thread. Raises ``OSError`` or ``SettingsError``."""

    def __init__(  # noqa: PLR0913 - each from another owner
        self,
        engine: Any,
        settings: EngineSettings,
        calls: EngineCalls,
        *,
        epoch: str,
        identity: Callable[[], CacheIdentity],
        serves: bool,
    ) -> None:
        self._engine = engine
        self._calls = calls
        self._epoch = epoch
        self._identity = identity
        self.holds = Holds(_EngineSessions(engine), lease_s=settings.pd_lease_s)
        self.endpoint = ""
        self._server: PdServer | None = None
        if serves:
            self._server = PdServer(
                partial(hand_over, self),
                Peers(settings.pd_networks),
                host=settings.pd_host,
                port=settings.pd_port,
                timeout_s=settings.pd_transfer_timeout_s,
            )
            self.endpoint = endpoint_of(settings, self._server.port)
            self._server.start()

    def give_up_all(self) -> None:
        """End every held session; sessions in computation are held with the new weights."""
        for session_id in [session.session_id for session in self._engine.scheduler.get_sessions()]:
            if self.holds.knows(session_id) and self.holds.is_computed(session_id):
                self._engine.end_session(session_id)

    def stats(self) -> PdStats:
        """Return totals; any thread, values may be a step apart."""
        counts = self.holds.counts
        requests, blocks = self.holds.held()
        return PdStats(
            endpoint=self.endpoint,
            held_requests=requests,
            held_blocks=blocks,
            handed_over=counts.handed_over,
            expired=counts.expired,
            released=counts.released,
        )

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    # What the door's threads ask.

    def begin(self, ticket: Ticket) -> Offer:
        """See ``Larder``. A read that no peer waits for any more ends at once."""
        begun: list[Offer] = []

        def work() -> Offer:
            begun.append(self._offer(ticket))
            return begun[0]

        def take_back() -> None:
            if begun:
                self.holds.end(ticket, taken=False)

        try:
            return self._calls(work, timeout_s=_CALL_S)
        except EngineBusyError as error:
            self._calls.post(take_back)
            raise TransferError("busy", str(error)) from error

    def pieces(self, offer: Offer) -> Iterator[memoryview]:
        """See ``Larder``: pool by pool and block by block, as LMDeploy plans its transfers."""
        import torch

        if self._engine.executor.model_agent.cache_engine is None:
            raise TransferError("refused", "the engine was put to sleep while a peer read the prompt")
        for pool in pools_of(self._engine):
            if pool.tensor.numel() == 0:
                continue
            for block in offer.block_ids:
                entry = pool.tensor.select(pool.entry_axis, block).contiguous().cpu()
                yield memoryview(entry.view(-1).view(torch.uint8).numpy())

    def still(self, ticket: Ticket) -> bool:
        """See ``Larder``."""
        try:
            return self._calls(lambda: self.holds.still(ticket), timeout_s=_CALL_S)
        except EngineBusyError as error:
            raise TransferError("busy", str(error)) from error

    def end(self, ticket: Ticket, *, taken: bool) -> None:
        """See ``Larder``. However long the engine is busy: what is read for ever stays for ever."""
        over = threading.Event()

        def work() -> None:
            self.holds.end(ticket, taken=taken)
            over.set()

        self._calls.post(work)
        over.wait(_CALL_S)

    def _offer(self, ticket: Ticket) -> Offer:
        session_id = self.holds.begin(ticket)
        try:
            return self._describe(session_id)
        except BaseException:
            self.holds.end(ticket, taken=False)
            raise

    def _describe(self, session_id: int) -> Offer:
        engine = self._engine
        [seq] = engine.scheduler.get_session(session_id).sequences.values()
        generated = [int(token) for token in seq.generated_ids]
        if len(generated) != 1:
            raise TransferError("refused", f"the prompt was prefilled with {len(generated)} tokens after it, not 1")
        prompt = seq.valid_ids[:-1]
        blocks = [int(block) for block in engine.scheduler.get_block_tables([seq])[0]]
        return Offer(
            epoch=self._epoch,
            identity=self._identity(),
            adapter=seq.adapter_name or "",
            tokens=token_bytes([int(token) for token in prompt]),
            token_id=generated[0],
            cached_tokens=int(seq.cached_tokens),
            session_id=session_id,
            block_ids=blocks,
            total_bytes=len(blocks) * sum(_entry_bytes(pool) for pool in pools_of(engine)),
            engine_config=engine_description(engine),
            pools=pool_descriptions(engine),
        )


class _EngineSessions:
    """See ``Sessions``. Counting happens on other threads too: they take copies of what the engine's may change."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def is_held(self, session_id: int) -> bool:
        from lmdeploy.pytorch.messages import MessageStatus

        session = self._engine.scheduler.get_session(session_id)
        return session is not None and any(
            seq.status is MessageStatus.TO_BE_MIGRATED for seq in list(session.sequences.values())
        )

    def end(self, session_id: int) -> None:
        self._engine.end_session(session_id)

    def blocks(self, session_id: int) -> int:
        session = self._engine.scheduler.get_session(session_id)
        return 0 if session is None else sum(int(seq.num_blocks) for seq in list(session.sequences.values()))


def _entry_bytes(pool: Any) -> int:
    entries = int(pool.tensor.shape[pool.entry_axis])
    return int(pool.tensor.numel() * pool.tensor.element_size()) // entries if entries else 0
