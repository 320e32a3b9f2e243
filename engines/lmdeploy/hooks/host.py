"""What is replaced so that the host keeps up with the device, and a start is warm."""

from engines.lmdeploy.patching import Hook


def host_hooks() -> list[Hook]:
    """In the engine process: which CUDA graphs are captured at start."""
    from engines.lmdeploy import graphs

    return [
        Hook(
            target="lmdeploy.pytorch.config:normalize_cudagraph_capture_batch_sizes",
            signature="(capture_sizes: list[int] | None, max_batches: int) -> list[int] | None",
            replace=graphs.normalize_capture_sizes,
            why="six running requests compute as eight",
        ),
        Hook(
            target="lmdeploy.pytorch.engine.model_agent.agent:BaseModelAgent.warmup",
            signature="(self)",
            replace=graphs.agent_warmup,
            why="what graphs take at start is in no log",
        ),
    ]


__all__ = ["host_hooks"]
