"""What is replaced in torch where CUDA is absent."""

from engines.lmdeploy.cpu.resources import CpuResources
from engines.lmdeploy.patching import Hook

_A_DEVICE = "(device: torch.device | str | int | None = None)"


def torch_hooks(resources: CpuResources) -> list[Hook]:
    """What LMDeploy expects of torch; installed before LMDeploy is imported, whose decorators use some of it."""
    return [*_stream_hooks(), *_memory_hooks(resources)]


def _stream_hooks() -> list[Hook]:
    from engines.lmdeploy.cpu import compiler, device

    return [
        Hook(
            target="torch:compile",
            signature=None,  # its keywords change with each torch; the stand-in takes them all
            replace=compiler.uncompiled,
            why="it needs a C++ compiler and ten seconds at first use",
        ),
        Hook(
            target="torch.cuda:Stream",
            signature="(device=None, priority=0, **kwargs)",
            replace=device.stream_type,
            why="the agent makes three streams",
        ),
        Hook(
            target="torch.cuda:Event",
            signature="(enable_timing=False, blocking=False, interprocess=False, external=False)",
            replace=device.event_type,
            why="steps and transfers are ordered by events",
        ),
        Hook(
            target="torch.cuda:stream",
            signature="(stream: Optional[ForwardRef('torch.cuda.Stream')]) -> torch.cuda.StreamContext",
            replace=device.stream_context,
            why="the agent's loops run inside a stream",
        ),
        Hook(
            target="torch.cuda:current_stream",
            signature=f"{_A_DEVICE} -> torch.cuda.streams.Stream",
            replace=device.the_stream,
            why="sampling and the cache engine ask for it",
        ),
        Hook(
            target="torch.cuda:default_stream",
            signature=f"{_A_DEVICE} -> torch.cuda.streams.Stream",
            replace=device.the_stream,
            why="queried with current_stream",
        ),
    ]


def _memory_hooks(resources: CpuResources) -> list[Hook]:
    from engines.lmdeploy.cpu import device

    return [
        Hook(
            target="torch.cuda:synchronize",
            signature=f"{_A_DEVICE} -> None",
            replace=device.nothing,
            why="sleep and weight updates wait for the device",
        ),
        Hook(
            target="torch.cuda:empty_cache",
            signature="() -> None",
            replace=device.nothing,
            why="called before memory is measured",
        ),
        Hook(
            target="torch.cuda:mem_get_info",
            signature="(device: 'Device' = None) -> tuple[int, int]",
            replace=device.mem_get_info(resources.kv_bytes),
            why="the KV pool is sized by free memory",
        ),
        Hook(
            target="torch.cuda:current_device",
            signature="() -> int",
            replace=device.current_device,
            why="tensors are made and moved there",
        ),
        Hook(
            target="torch.cuda:set_device",
            signature="(device: torch.device | str | int | None) -> None",
            replace=device.nothing,
            why="executors select a device",
        ),
    ]
