"""Hooks that let a strategy order all waiting requests."""

from engines.lmdeploy.hooks.names import MESSAGES, SEQUENCES, STATUS
from engines.lmdeploy.patching import Hook

_PAGING = "lmdeploy.pytorch.paging"


def schedule_hooks() -> list[Hook]:
    """In both processes: how urgent a request is travels with it, and decides when it is tried."""
    return [*_urgency_hooks(), *_queue_hooks(), *_chunk_hooks(), *_status_hooks(), *_handle_hooks()]


def _urgency_hooks() -> list[Hook]:
    from engines.lmdeploy.schedule import urgency

    return [
        Hook(
            target=f"{MESSAGES}:GenerationConfig.__post_init__",
            signature="(self)",
            replace=urgency.CARRIED_URGENCY.generation_config_post_init,
            why="it is made where the request is handled, and is sent to the engine process",
        ),
        Hook(
            target="lmdeploy.pytorch.messages:SamplingParam.from_gen_config",
            signature=f"(cls, gen_config: {MESSAGES}.GenerationConfig)",
            replace=urgency.CARRIED_URGENCY.sampling_param_from_gen_config,
            why="a sequence keeps it from the request",
        ),
    ]


def _queue_hooks() -> list[Hook]:
    from engines.lmdeploy.schedule import scheduler

    return [
        Hook(
            target=f"{_PAGING}.scheduler:Scheduler.__init__",
            signature=(
                "(self, scheduler_config: lmdeploy.pytorch.config.SchedulerConfig, "
                "cache_config: lmdeploy.pytorch.config.CacheConfig, "
                "seq_meta: lmdeploy.pytorch.messages.SequenceMeta | None = None, "
                "kv_connector: 'KVConnectorBase | None' = None) -> None"
            ),
            replace=scheduler.scheduler_init,
            why="a scheduler gets its queue",
        ),
        Hook(
            target=f"{_PAGING}.scheduler:Scheduler.waiting",
            signature="(self) -> list[lmdeploy.pytorch.messages.SchedulerSequence]",
            replace=scheduler.scheduler_waiting,
            why="all waiting sequences are listed, walked and sorted several times in a step",
        ),
        Hook(
            target=f"{_PAGING}.prefill_scheduler:_PrefillReorderer.reorder",
            signature=(
                "(self, waiting: list[lmdeploy.pytorch.messages.SchedulerSequence], "
                f"turn_policy: {_PAGING}.prefill_scheduler._PrefillTurnPolicy)"
            ),
            replace=scheduler.reorder,
            why="it sorts by arrival, and short prompts by length",
        ),
    ]


def _chunk_hooks() -> list[Hook]:
    from engines.lmdeploy.schedule import chunk_space, chunked_again, prefill_gate

    return [
        Hook(
            target=f"{_PAGING}.prefill_scheduler:_PrefillAdmissionAttempt._try_match_prefix_for_prefill_gate",
            signature="(self) -> bool",
            replace=prefill_gate.try_match_prefix_for_prefill_gate,
            why="beside a chunk every long prompt that waits is matched at every step, and the match taken back",
        ),
        Hook(
            target="lmdeploy.pytorch.engine.inputs_maker:_ForwardInputsTask._try_active_chunk",
            signature="(self)",
            replace=chunk_space.task_try_active_chunk,
            why="a chunk without room and a loaded prompt that waits would wait for each other for ever",
        ),
        Hook(
            target="lmdeploy.pytorch.engine.inputs_maker:_ForwardInputsTask._schedule_prefill",
            signature="(self, allow_long_prefill: bool = True, prefer_long_prefill: bool = False)",
            replace=chunked_again.task_schedule_prefill,
            why="an answer that is computed again in chunks was decoded between them, and the engine died",
        ),
        Hook(
            target="lmdeploy.pytorch.engine.inputs_maker:InputsMakerAsync.update_running_seqs",
            signature="(self, running: 'SeqList', inputs: 'ModelInputs|None')",
            replace=chunked_again.maker_update_running_seqs,
            why="a prompt cancelled between its chunks became an answer, and the engine died of the next prompt",
        ),
    ]


def _status_hooks() -> list[Hook]:
    from engines.lmdeploy.schedule import scheduler

    return [
        Hook(
            target=f"{SEQUENCES}.register_sequence",
            signature="(self, seq: 'SchedulerSequence')",
            replace=scheduler.manager_register,
            why="the queue follows each new sequence",
        ),
        Hook(
            target=f"{SEQUENCES}.unregister_sequence",
            signature="(self, seq: 'SchedulerSequence')",
            replace=scheduler.manager_unregister,
            why="the queue follows each sequence that ends",
        ),
        Hook(
            target=f"{SEQUENCES}.update_sequence_status",
            signature=f"(self, seq: 'SchedulerSequence', new_status: {STATUS})",
            replace=scheduler.manager_update,
            why="and of each that begins or ceases to wait",
        ),
    ]


def _handle_hooks() -> list[Hook]:
    from engines.lmdeploy.schedule import handles

    return [
        Hook(
            target="lmdeploy.pytorch.engine.mp_engine.base_worker:EngineInstancePool.instance",
            signature="(self)",
            replace=handles.instance_pool_instance,
            why="requests beyond twice the batch wait there in the order of arrival, and cancellations behind them",
        ),
        Hook(
            target="lmdeploy.pytorch.engine.request:RequestSender.async_recv",
            signature=(
                "(self, resp: lmdeploy.pytorch.engine.request.Response, wait_main: bool = False) "
                "-> lmdeploy.pytorch.engine.request.Response"
            ),
            replace=handles.sender_async_recv,
            why="streams wait for each other, and each request that waits wakes the engine's loop once a second",
        ),
        Hook(
            target="lmdeploy.serve.managers.session_manager:SessionManager.build_request_handle_pool",
            signature="(self, engine, size)",
            replace=handles.build_request_handle_pool,
            why="requests beyond the batch wait there in the order of arrival",
        ),
    ]
