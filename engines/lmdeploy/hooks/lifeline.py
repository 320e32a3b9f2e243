"""Hooks that end both processes of an instance together."""

from engines.lmdeploy.hooks.names import ENGINE, MESSAGES
from engines.lmdeploy.patching import Hook


def lifeline_hooks() -> list[Hook]:
    """An instance ends as a whole: the server when its engine process dies, the engine when the server does."""
    from engines.lmdeploy import lifeline
    from engines.lmdeploy.http import rpc

    engine = "lmdeploy.pytorch.engine.mp_engine.zmq_engine:ZMQMPEngine"
    return [
        Hook(
            target=f"{engine}._start_mp_proc",
            signature=(
                f"(self, model_path: str, engine_config: {MESSAGES}.PytorchEngineConfig = None, "
                f"speculative_config: {MESSAGES}.SpeculativeConfig = None, **kwargs)"
            ),
            replace=lifeline.watch_engine,
            why="the server answers 503 for ever after its engine process has ended",
        ),
        Hook(
            target=f"{engine}._mp_proc",
            signature=(
                "(shared_dict: dict, condition: <bound method BaseContext.Condition of "
                "<multiprocessing.context.DefaultContext object>>, model_path: str, "
                f"engine_config: {MESSAGES}.PytorchEngineConfig = None, log_level: str = 'WARNING', "
                f"speculative_config: {MESSAGES}.SpeculativeConfig = None, **kwargs)"
            ),
            replace=lifeline.engine_process,
            why="it could die at start-up when its parent was quick",
        ),
        Hook(
            target=f"{engine}.close",
            signature="(self) -> None",
            replace=lifeline.closing,
            why="an engine process that ends after close() is no failure",
        ),
        Hook(
            target=f"{ENGINE}.async_loop",
            signature="(self)",
            replace=lifeline.engine_loop,
            why="a process whose engine loop failed lives on and serves nothing",
        ),
        Hook(
            target="lmdeploy.pytorch.engine.mp_engine.zmq_rpc:AsyncRPCServer.__init__",
            signature="(self)",
            replace=rpc.rpc_server_init,
            why="its socket drops answers beyond 1,000, and their requests wait for ever",
        ),
    ]
