"""What is replaced so that every step of an engine is noted, timed, and chosen by a pace."""

from engines.lmdeploy.hooks.names import SEQUENCES, STATUS
from engines.lmdeploy.patching import Hook

_MAKER = "lmdeploy.pytorch.engine.inputs_maker"
_LOOP = "lmdeploy.pytorch.engine.engine_loop"
_AGENT = "lmdeploy.pytorch.engine.model_agent.agent:BaseModelAgent"
_INPUTS = "lmdeploy.pytorch.model_inputs.ModelInputs"
_CHECKPOINTS = "lmdeploy.pytorch.engine.cache_inputs.CacheCheckpointInputs"
_STRATEGIES = "lmdeploy.pytorch.strategies.base.model_agent"

_STEP = (
    f"(self, inputs: {_INPUTS}, delta: {_INPUTS}Delta = None, "
    "swap_in_map: dict = None, swap_out_map: dict = None, "
    "sampling_inputs: lmdeploy.pytorch.engine.logits_process.SamplingInputs = None, "
    f"stopping_criteria: {_STRATEGIES}.StoppingCriteria = None, return_logits: bool = False, "
    "return_routed_experts: bool = False, return_ce_loss: bool = False, "
    f"extra_inputs: {_STRATEGIES}.ExtraInputs = None, "
    f"cache_inputs: {_CHECKPOINTS} | None = None, kv_connector_metadata=None)"
)

_CONFIG = "lmdeploy.pytorch.config"
_AGENT_INIT = (
    f"(self, model_path: str, model_config: {_CONFIG}.ModelConfig, cache_config: {_CONFIG}.CacheConfig, "
    f"backend_config: {_CONFIG}.BackendConfig, misc_config: {_CONFIG}.MiscConfig, "
    "dist_ctx: lmdeploy.pytorch.distributed.DistContext, "
    "device_ctx: lmdeploy.pytorch.devices.device_manager.DeviceContext, adapters: dict[str, str] = None, "
    f"specdecode_config: {_CONFIG}.SpecDecodeConfig = None, trust_remote_code: bool = False)"
)


def step_hooks() -> list[Hook]:
    """In the engine process: the timeline of steps, and the pace that chooses them."""
    return [*_scheduler_hooks(), *_pace_hooks(), *_model_hooks(), *_overlap_hooks()]


def _scheduler_hooks() -> list[Hook]:
    from engines.lmdeploy.schedule import step_watch

    return [
        Hook(
            target=f"{_MAKER}:InputsMakerAsync._init_do_prefill",
            signature=f"(self, config: {_MAKER}.InputsMakerConfig)",
            replace=step_watch.maker_init_do_prefill,
            why="an engine whose loop begins gets its timeline",
        ),
        Hook(
            target=f"{_MAKER}:InputsMakerAsync.reset_runtime_state",
            signature="(self)",
            replace=step_watch.maker_reset_runtime_state,
            why="an engine that goes to sleep drops the steps that were sent",
        ),
        Hook(
            target=f"{_LOOP}:EngineLoop._finish_forward_output",
            signature=(
                "(self, out: 'BatchedOutputs | None', running: 'SeqList', model_inputs: 'ModelInputs | None', "
                "delta: 'ModelInputsDelta | None')"
            ),
            replace=step_watch.loop_finish_forward_output,
            why="tokens are back: the only time there is of a model in other processes",
        ),
        Hook(
            target=f"{_LOOP}:RunableEventAsync.wait",
            signature="(self)",
            replace=step_watch.runable_wait,
            why="the device is idle for want of requests",
        ),
        Hook(
            target=f"{_LOOP}:EngineLoop._wait_for_schedulable_prefill",
            signature="(self)",
            replace=step_watch.loop_wait_for_prefill,
            why="the device is idle as requests wait for KV",
        ),
        Hook(
            target=f"{_LOOP}:EngineLoop.resume_from_sleep",
            signature="(self)",
            replace=step_watch.loop_resume_from_sleep,
            why="the device was idle while the engine slept",
        ),
    ]


def _pace_hooks() -> list[Hook]:
    from engines.lmdeploy.schedule import paced_maker

    return [
        Hook(
            target="lmdeploy.pytorch.paging.scheduler:Scheduler.__init__",
            signature=(
                "(self, scheduler_config: lmdeploy.pytorch.config.SchedulerConfig, "
                "cache_config: lmdeploy.pytorch.config.CacheConfig, "
                "seq_meta: lmdeploy.pytorch.messages.SequenceMeta | None = None, "
                "kv_connector: 'KVConnectorBase | None' = None) -> None"
            ),
            replace=paced_maker.scheduler_init,
            why="a scheduler gets its pacer",
        ),
        Hook(
            target=f"{_MAKER}:InputsMakerAsync._init_do_prefill",
            signature=f"(self, config: {_MAKER}.InputsMakerConfig)",
            replace=paced_maker.maker_init_do_prefill,
            why="prompts are computed back to back while answers wait",
        ),
        Hook(
            target=f"{_MAKER}:InputsMakerAsync._make_forward_inputs",
            signature="(self, prefill: bool, enable_empty: bool = False)",
            replace=paced_maker.maker_make_forward_inputs,
            why="a step was chosen: the host knows its prompts, its tokens and the requests that wait",
        ),
        Hook(
            target=f"{_MAKER}:InputsMakerAsync.reset_runtime_state",
            signature="(self)",
            replace=paced_maker.maker_reset_runtime_state,
            why="an engine that goes to sleep owes no steps",
        ),
        Hook(
            target=f"{_MAKER}:_ForwardInputsTask._should_defer_active_chunk",
            signature="(self)",
            replace=paced_maker.task_should_defer_active_chunk,
            why="the last chunk follows the one before it at once",
        ),
        Hook(
            target=f"{_MAKER}:_ForwardInputsTask._try_active_chunk",
            signature="(self)",
            replace=paced_maker.task_try_active_chunk,
            why="a prompt with few tokens left waits for all chunks of a long one",
        ),
        Hook(
            target=f"{_MAKER}:InputsMakerAsync.has_pending_long_context_chunk",
            signature="(self)",
            replace=paced_maker.maker_has_pending_chunk,
            why="an engine whose only request is a prompt that was overtaken would wait for another request",
        ),
    ]


def _model_hooks() -> list[Hook]:
    from engines.lmdeploy.schedule import step_watch

    return [
        Hook(
            target=f"{_AGENT}._async_step",
            signature=_STEP,
            replace=step_watch.agent_step,
            why="a step is begun and launched",
        ),
        Hook(
            target=f"{_AGENT}._async_model_forward",
            signature=(f"(self, inputs: {_INPUTS}, return_logits: bool, cache_inputs: {_CHECKPOINTS} | None = None)"),
            replace=step_watch.agent_model_forward,
            why="the device's part of a step begins",
        ),
    ]


def _overlap_hooks() -> list[Hook]:
    from engines.lmdeploy.schedule import overlap

    return [
        Hook(
            target=f"{_AGENT}.__init__",
            signature=_AGENT_INIT,
            replace=overlap.agent_init,
            why="decode steps have priority over a chunk beside them",
        ),
        Hook(
            target=f"{_AGENT}._async_step",
            signature=_STEP,
            replace=overlap.agent_step,
            why="answers stand still while a chunk is computed",
        ),
        Hook(
            target=f"{SEQUENCES}.unregister_sequence",
            signature="(self, seq: 'SchedulerSequence')",
            replace=overlap.manager_unregister,
            why="whoever gets the blocks of a chunk that is under way writes after it",
        ),
        Hook(
            target=f"{SEQUENCES}.update_sequence_status",
            signature=f"(self, seq: 'SchedulerSequence', new_status: {STATUS})",
            replace=overlap.manager_update,
            why="whoever gets the blocks of a chunk that is under way writes after it",
        ),
    ]
