"""An engine's part in prefill/decode separation, by its role, with fixes of LMDeploy's own separation."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from engines.lmdeploy.engine_calls import EngineCalls
from engines.lmdeploy.offload.tiers import EngineTiers
from engines.lmdeploy.pd.decode import PdDecode
from engines.lmdeploy.pd.prefill import PdPrefill
from engines.lmdeploy.pd.request import part_of, role_of
from engines.lmdeploy.pd.tiers import PdTiers
from engines.lmdeploy.pd.transport import transport_of
from engines.lmdeploy.settings import EngineSettings, PdTransport, SettingsError
from kvcontrol.core.blocks import CacheIdentity
from kvcontrol.core.pd import Fetch, Hold, PdStats, new_ticket
from kvcontrol.core.roles import EngineRole, KVTransport

_PART = "kvgate_pd_part"
_DOMAIN = "tcp"
"""Whoever speaks our protocol reaches whoever else does; lists of peers are the operator's affair."""
_log = logging.getLogger("lmdeploy.kvgate")


class PdPart:
    """One engine's service to other engines; raises ``OSError`` or ``SettingsError`` if its setup fails."""

    def __init__(
        self,
        engine: Any,
        settings: EngineSettings,
        calls: EngineCalls,
        *,
        epoch: str,
        identity: Callable[[], CacheIdentity],
    ) -> None:
        self.role = role_of(engine.engine_config)
        if self.role is not EngineRole.HYBRID and settings.ddr_bytes:
            raise SettingsError(
                f"KVGATE_ENGINE_DDR_BYTES={settings.ddr_bytes} gives tiers to a {self.role} instance; "
                "only hybrid ones have them: LMDeploy doesn't combine a KV connector with its migration"
            )
        self.prefill: PdPrefill | None = None
        self.decode: PdDecode | None = None
        self.tiers: PdTiers | None = None
        self._settings, self._calls = settings, calls
        self._serves = (
            self.role is not EngineRole.HYBRID
            and transport_of(settings, str(engine.engine_config.device_type)) is PdTransport.TCP
        )
        if self.role is EngineRole.PREFILL:
            self.prefill = PdPrefill(engine, settings, calls, epoch=epoch, identity=identity, serves=self._serves)
        elif self.role is EngineRole.DECODE:
            self.decode = PdDecode(engine, settings, identity=identity)
        setattr(engine, _PART, self)

    def share(self, tiers: EngineTiers) -> None:
        """Hand prompts over through tiers that were started, where that is set; raises ``OSError``."""
        if self._settings.pd_transport is PdTransport.TIERS:
            self.tiers = PdTiers(tiers, self._settings, self._calls)

    def close(self) -> None:
        if self.prefill is not None:
            self.prefill.close()
        if self.tiers is not None:
            self.tiers.close()

    def pool_gone(self) -> None:
        """Forget where the engine's KV pool was; the engine's thread."""
        if self.decode is not None:
            self.decode.pool_gone()

    def weights_changed(self) -> None:
        """Drop prompts of the old weights, whose pool may be gone, too; the engine's thread."""
        self.pool_gone()
        if self.prefill is not None:
            self.prefill.give_up_all()

    def transports(self) -> dict[KVTransport, str]:
        """Return how prompts are handed over, and within which domain; any thread."""
        if self.tiers is not None:
            return {KVTransport.TIERS: f"{_DOMAIN};{self.tiers.layout}"}
        if self.decode is None and (self.prefill is None or not self.prefill.endpoint):
            return {}
        return {KVTransport.MIGRATION: _DOMAIN} if self._serves else {}

    def stats(self) -> PdStats | None:
        """Return totals, None for an engine that does whole requests alone; any thread, values may be a step apart."""
        if self.tiers is not None:
            return self.tiers.stats()
        if self.prefill is not None:
            return self.prefill.stats()
        return None if self.decode is None else self.decode.stats()


def pd_of(engine: Any) -> PdPart | None:
    """Return the part of an LMDeploy ``Engine``, None before it has one."""
    part: PdPart | None = getattr(engine, _PART, None)
    return part


# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def on_add_message(original: Callable[..., None]) -> Callable[..., None]:
    """``Engine._on_add_message``: by its ticket, a request's prompt is held or fetched."""

    def _on_add_message(self: Any, reqs: list[Any], **kwargs: Any) -> None:
        accepted = [req for req in reqs if _prepare(self, req)]
        if accepted:
            original(self, accepted, **kwargs)

    return _on_add_message


def _prepare(engine: Any, req: Any) -> bool:
    """Convert the ticket to LMDeploy's own fields; False if the request was refused."""
    from lmdeploy.pytorch.disagg.conn.protocol import MigrationProtocol, MigrationRequest
    from lmdeploy.pytorch.engine.request import ResponseType

    pd, data = pd_of(engine), req.data
    if pd is None:
        return True
    part = part_of(data["sampling_param"])
    fits = not isinstance(part, Hold) or pd.prefill is not None
    if pd.prefill is not None and (isinstance(part, Hold) or data.get("preserve_cache")):
        ticket = part.ticket if isinstance(part, Hold) else new_ticket()
        fits = pd.prefill.holds.expect(ticket, data["session_id"])
        data["preserve_cache"] = True
    elif isinstance(part, Fetch):
        fits = pd.decode is not None
        data["migration_request"] = MigrationRequest(
            protocol=MigrationProtocol.TCP,
            remote_engine_id=part.source,
            remote_session_id=0,  # this, the token and the blocks are told with the transfer
            remote_token_id=0,
            remote_block_ids=[],
        )
    if not fits:
        _log.warning("session[%s] is refused: its ticket is in use, or not for this role", data["session_id"])
        engine._response(req.resp, ResponseType.NOT_SUPPORTED)  # noqa: SLF001
    return fits


def on_end_session(original: Callable[..., None]) -> Callable[..., None]:
    """``Engine._on_end_session``: a held prompt begins its lease; one that was given up is freed.

    LMDeploy marks the blocks of the former as evictable, and its loop ended at the latter.
    """

    def _on_end_session(self: Any, reqs: list[Any], **kwargs: Any) -> None:
        from lmdeploy.pytorch.engine.request import ResponseType

        pd = pd_of(self)
        for req in reqs:
            session_id = req.data["session_id"]
            session = self.scheduler.get_session(session_id)
            if session is None or not any(seq.preserve_cache for seq in session.sequences.values()):
                if pd is not None and pd.prefill is not None:
                    pd.prefill.holds.gone(session_id)  # its message may have been refused
                original(self, [req], **kwargs)
                continue
            later = asyncio.get_running_loop().call_later
            if pd is None or pd.prefill is None or not pd.prefill.holds.keep(session_id, later):
                self.end_session(session_id)
            if req.data.get("response", True):
                self._response(req.resp, ResponseType.SUCCESS)

    return _on_end_session


def on_stop_session(original: Callable[..., None]) -> Callable[..., None]:
    """``Engine._on_stop_session``: a client that is found to have left when its prompt is held already gives it up.

    LMDeploy ends a session before it looks for its client, and stops it then: its blocks waited for the end of their
    lease under a ticket that could not be fetched any more.
    """

    def _on_stop_session(self: Any, reqs: list[Any], **kwargs: Any) -> None:
        original(self, reqs, **kwargs)
        pd = pd_of(self)
        if pd is None or pd.prefill is None:
            return
        for session_id in [req.data["session_id"] for req in reqs]:
            if pd.prefill.holds.waits(session_id):
                self.end_session(session_id)

    return _on_stop_session


def end_session(original: Callable[[Any, int], bool]) -> Callable[[Any, int], bool]:
    """``Engine.end_session``: not while the session's blocks are read by a peer, and then at once."""

    def end_session(self: Any, session_id: int) -> bool:
        pd = pd_of(self)
        if pd is None or pd.prefill is None:
            return original(self, session_id)
        if pd.prefill.holds.must_wait(session_id):
            return True
        pd.prefill.holds.gone(session_id)
        return original(self, session_id)

    return end_session


def update_running_seqs(original: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """``InputsMakerAsync.update_running_seqs``: at a prefill instance a long prompt's first chunk was its last."""

    def update_running_seqs(self: Any, running: Any, inputs: Any) -> None:
        from lmdeploy.pytorch.disagg.config import EngineRole

        if self.config.role is EngineRole.Prefill:
            if inputs is not None and inputs.is_chunk and self.long_context_chunker.enabled():
                self.long_context_chunker.update_step(inputs)
            return
        original(self, running, inputs)

    return update_running_seqs


def migration_loop(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``EngineLoop.migration_loop``: its first failure ended it, and with it every later transfer."""

    async def migration_loop(self: Any) -> None:
        pd = pd_of(self.engine_conn.engine)
        if pd is None or pd.decode is None:
            await original(self)
        else:
            await pd.decode.run(self)

    return migration_loop
