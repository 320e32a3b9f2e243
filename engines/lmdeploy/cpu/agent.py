"""LMDeploy's model agent on a CPU: where the model computes, and which tensors are copies.

On CUDA a forward is queued and the event loop goes on; on a CPU it would block the loop, and with it the scheduler,
cancellation and the RPC server. So the model computes on one thread of its own. All its arithmetic stays on that
thread, the projection to the vocabulary too: OpenMP keeps a team of workers for each thread that calls it, and two
teams that spin on the same cores slow each other down.
"""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any

import torch


def host_to_device(original: Any) -> Any:
    """Replace ``_try_to_cuda``: a real copy, since the agent updates its inputs in place."""

    @wraps(original)
    def copy(val: Any, non_blocking: bool = False) -> Any:  # noqa: FBT001, FBT002
        del non_blocking
        if val is None:
            return None
        if isinstance(val, torch.Tensor):
            return val.clone()
        return _clone_tensors(val.to_device("cpu", non_blocking=False))

    return copy


def device_to_host(original: Any) -> Any:
    """Wrap ``BatchedOutputs.to_cpu``, which aliases on a CPU: outputs of the agent are copies."""

    @wraps(original)
    def to_cpu(self: Any) -> Any:
        outputs = _clone_tensors(original(self))
        for field in fields(outputs):
            _clone_tensors(getattr(outputs, field.name))
        return outputs

    return to_cpu


def agent_init(original: Any) -> Any:
    """Wrap ``BaseModelAgent.__init__``, which names its device ``cuda``."""

    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.device = "cpu"

    return init


def no_warmup(original: Any) -> Any:
    """Replace ``BaseModelAgent.warmup``: there are no graphs to capture, it would only delay the start."""

    @wraps(original)
    def warmup(self: Any) -> None:
        del self

    return warmup


def compute_on_own_thread(threads: int) -> Any:
    """Wrap ``BaseModelAgent._async_model_forward``: the whole of it runs on the compute thread of this process."""
    pool = ThreadPoolExecutor(
        1, thread_name_prefix="kvgate-compute", initializer=torch.set_num_threads, initargs=(threads,)
    )

    def replace(original: Any) -> Any:
        @wraps(original)
        async def forward(self: Any, inputs: Any, return_logits: bool, cache_inputs: Any = None) -> Any:  # noqa: FBT001
            def compute() -> Any:
                with torch.inference_mode():
                    return _run(original(self, inputs, return_logits, cache_inputs))

            return await asyncio.get_running_loop().run_in_executor(pool, compute)

        return forward

    return replace


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that only ever yields (``asyncio.sleep(0)``) to its end, without a loop."""
    try:
        while True:
            waiting_for = coroutine.send(None)
            if waiting_for is not None:
                raise RuntimeError(f"the model's forward waits for {waiting_for!r}, which a compute thread can't")
    except StopIteration as end:
        return end.value
    finally:
        coroutine.close()


def _clone_tensors(value: Any) -> Any:
    if is_dataclass(value):
        for field in fields(value):
            held = getattr(value, field.name)
            if isinstance(held, torch.Tensor):
                object.__setattr__(value, field.name, held.clone())
    return value
