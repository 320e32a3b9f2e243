"""Stand-ins for the parts of ``torch.cuda`` that LMDeploy's engine calls, on a machine that has none.

On a CPU every operation has finished when its call returns, so a stream has nothing to order and an event has always
happened. ``torch.cuda.is_available()`` stays False.
"""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import psutil
import torch

CPU = torch.device("cpu")


class CpuEvent:
    """An event that has passed as soon as it is recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.recorded_s: float | None = None

    def record(self, stream: Any = None) -> None:
        del stream
        self.recorded_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "CpuEvent") -> float:
        """Milliseconds between two recorded events."""
        if self.recorded_s is None or end.recorded_s is None:
            raise RuntimeError("elapsed_time of an event that was never recorded")
        return (end.recorded_s - self.recorded_s) * 1e3


class CpuStream:
    """A stream whose work is always done; also its own context manager."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        return True

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        event = event or CpuEvent()
        event.record(self)
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the stream: there is no other to return to."""


_DEFAULT_STREAM = CpuStream()


def stream_type(original: Any) -> Any:
    """Replace ``torch.cuda.Stream``."""
    del original
    return CpuStream


def event_type(original: Any) -> Any:
    """Replace ``torch.cuda.Event``."""
    del original
    return CpuEvent


def stream_context(original: Any) -> Any:
    """Replace ``torch.cuda.stream(stream)``."""
    del original

    def stream(stream: CpuStream | None) -> CpuStream:
        return stream or _DEFAULT_STREAM

    return stream


def the_stream(original: Any) -> Any:
    """Replace ``torch.cuda.current_stream`` and ``default_stream``."""
    del original

    def current(device: Any = None) -> CpuStream:
        del device
        return _DEFAULT_STREAM

    return current


def nothing(original: Any) -> Any:
    """Replace a function of which nothing is left to do: ``synchronize``, ``empty_cache``, ``set_device``."""
    del original

    def do_nothing(device: Any = None) -> None:
        del device

    return do_nothing


def current_device(original: Any) -> Any:
    """Replace ``torch.cuda.current_device`` by a value for ``Tensor.to`` and ``torch.empty(device=)``."""
    del original

    def current() -> Any:
        return CPU

    return current


def mem_get_info(kv_bytes: int) -> Callable[[Any], Any]:
    """Replace ``torch.cuda.mem_get_info``: free is ``kv_bytes``, or the machine's free memory if that is less."""

    def replace(original: Any) -> Any:
        del original

        def info(device: Any = None) -> tuple[int, int]:
            del device
            memory = psutil.virtual_memory()
            return min(kv_bytes, memory.available), memory.total

        return info

    return replace
