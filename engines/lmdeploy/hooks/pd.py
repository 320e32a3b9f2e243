"""Hooks that let one engine continue another engine's prompts."""

from engines.lmdeploy.hooks.names import ENGINE, MESSAGES, TRIE
from engines.lmdeploy.patching import Hook

_LOOP = "lmdeploy.pytorch.engine.engine_loop:EngineLoop"
_PROTOCOL = "lmdeploy.pytorch.disagg.conn.protocol"


def pd_hooks() -> list[Hook]:
    """In both processes: tickets, what is held for them, LMDeploy's migration over TCP with its faults mended, and
    what is borrowed through the tiers.
    """
    return [*_ticket_hooks(), *_holding_hooks(), *_transfer_hooks()]


def _ticket_hooks() -> list[Hook]:
    from engines.lmdeploy.pd import part, request

    return [
        Hook(
            target=f"{MESSAGES}:GenerationConfig.__post_init__",
            signature="(self)",
            replace=request.CARRIED_PART.generation_config_post_init,
            why="it is made where the request is handled, and is sent to the engine process",
        ),
        Hook(
            target="lmdeploy.pytorch.messages:SamplingParam.from_gen_config",
            signature=f"(cls, gen_config: {MESSAGES}.GenerationConfig)",
            replace=request.CARRIED_PART.sampling_param_from_gen_config,
            why="a sequence keeps it from the request",
        ),
        Hook(
            target=f"{ENGINE}._on_add_message",
            signature="(self, reqs: list[lmdeploy.pytorch.engine.request.Request], **kwargs)",
            replace=part.on_add_message,
            why="a ticket becomes LMDeploy's own fields where a request enters the engine",
        ),
    ]


def _holding_hooks() -> list[Hook]:
    from engines.lmdeploy.pd import part

    return [
        Hook(
            target=f"{ENGINE}._on_end_session",
            signature="(self, reqs: list[lmdeploy.pytorch.engine.request.Request], **kwargs)",
            replace=part.on_end_session,
            why="a held prompt's blocks were evictable, and a cancelled one ended the engine's loop",
        ),
        Hook(
            target=f"{ENGINE}._on_stop_session",
            signature="(self, reqs: list[lmdeploy.pytorch.engine.request.Request], **kwargs)",
            replace=part.on_stop_session,
            why="a prompt whose client left when it was held already kept its blocks until the end of its lease",
        ),
        Hook(
            target=f"{ENGINE}.end_session",
            signature="(self, session_id: int)",
            replace=part.end_session,
            why="blocks must not be freed while a peer reads them",
        ),
    ]


def _transfer_hooks() -> list[Hook]:
    from engines.lmdeploy.pd import backend, borrower, part

    return [
        Hook(
            target="lmdeploy.pytorch.engine.inputs_maker:InputsMakerAsync.update_running_seqs",
            signature="(self, running: 'SeqList', inputs: 'ModelInputs|None')",
            replace=part.update_running_seqs,
            why="a prompt longer than one chunk was never finished at a prefill instance",
        ),
        Hook(
            target=f"{_LOOP}.migration_loop",
            signature="(self)",
            replace=part.migration_loop,
            why="its first failure ended it, and with it every later transfer",
        ),
        Hook(
            target="lmdeploy.pytorch.engine.cache_engine.engine:CacheEngine.p2p_initialize",
            signature=(
                f"(self, migration_init_request: {_PROTOCOL}.DistServeInitRequest) "
                f"-> {_PROTOCOL}.DistServeKVTransferEndpointInfo"
            ),
            replace=backend.cache_engine_p2p_initialize,
            why="LMDeploy has no migration back end for a machine without RDMA or NVLink",
        ),
        Hook(
            target=f"{TRIE}.trie:BlockTrie.finalize_match",
            signature="(seq: lmdeploy.pytorch.messages.SchedulerSequence) -> None",
            replace=borrower.finalize_match,
            why="a prompt that was computed elsewhere for this very request counted as cached",
        ),
    ]
