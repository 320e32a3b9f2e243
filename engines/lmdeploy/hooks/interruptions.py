"""Hooks that leave no stale state after sleep, wake and weight updates."""

from engines.lmdeploy.hooks.names import ENGINE
from engines.lmdeploy.patching import Hook

_LOOP = "lmdeploy.pytorch.engine.engine_loop:EngineLoop"
_WORKER = "lmdeploy.pytorch.engine.mp_engine.base_worker:EngineWorkerBase"


def interruption_hooks() -> list[Hook]:
    """In the engine process: operations that interrupt steps wait for them, and drop stale state."""
    return [*_sleep_hooks(), *_weight_hooks()]


def _sleep_hooks() -> list[Hook]:
    from engines.lmdeploy import interruptions, pauses

    return [
        Hook(
            target=f"{_LOOP}._main_loop_get_outputs",
            signature="(self, running: 'SeqList', forward_inputs: dict[str, typing.Any])",
            replace=pauses.main_loop_get_outputs,
            why="sleep forgot a forward that was sent: its tokens became another request's answer, or the engine died",
        ),
        Hook(
            target=f"{ENGINE}.sleep",
            signature="(self, level: int = 1)",
            replace=interruptions.engine_sleep,
            why="the trie outlives the pool that sleep frees, and would serve garbage",
        ),
        Hook(
            target=f"{ENGINE}.wakeup",
            signature="(self, tags: list[str] | None = None)",
            replace=interruptions.engine_wakeup,
            why="an engine that is awake, or not asleep yet, got another KV pool under its forwards",
        ),
    ]


def _weight_hooks() -> list[Hook]:
    from engines.lmdeploy import interruptions

    return [
        Hook(
            target=f"{ENGINE}.update_params",
            signature="(self, request: Any)",
            replace=interruptions.engine_update_params,
            why="the trie outlives the weights that its blocks were computed with",
        ),
        Hook(
            target=f"{_WORKER}.update_params",
            signature="(self, request: Any)",
            replace=interruptions.worker_update_params,
            why="weights changed under the forwards that read them",
        ),
        *(
            Hook(
                target=f"lmdeploy.pytorch.engine.executor.uni_executor:UniExecutor.{name}",
                signature="(self, request: Any)",
                replace=interruptions.executor_of_one_device,
                why="an engine on one device had no way to change its weights that doesn't need CUDA IPC",
            )
            for name in (
                "update_params",
                "init_weights_update_group",
                "update_weights_from_distributed",
                "destroy_weights_update_group",
            )
        ),
        Hook(
            target=f"{ENGINE}.update_weights_from_ipc",
            signature="(self, request: Any, reject_reason: str | None = None)",
            replace=interruptions.engine_update_weights,
            why="both of it",
        ),
        Hook(
            target=f"{ENGINE}.update_weights_from_distributed",
            signature="(self, request: Any)",
            replace=interruptions.engine_update_weights,
            why="both of it",
        ),
    ]
