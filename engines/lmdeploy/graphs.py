"""CUDA graphs for the batch sizes that occur, and their cost at start.

A decode step runs the graph of the next larger size that was captured, with padding rows up to it. LMDeploy captures
powers of two, so that six running requests compute as eight. A few long contexts at once are the common load of an
engine: the small even sizes are captured too.

A graph that can't be captured ends LMDeploy's engine. Here the decode steps of its size are computed without one, and
the log names the size and the reason.
"""

import logging
import sys
import time
from collections.abc import Callable
from typing import Any, Final

SMALL_SIZES: Final = (1, 2, 4, 6, 8)
_STEP: Final = 256
_REFUSED: Final = "kvgate_without_graph"
_log = logging.getLogger("lmdeploy.kvgate")


def capture_sizes(max_batch_size: int) -> list[int]:
    """Return the batch sizes to capture, ascending: small ones, powers of two, then every 256th, and the largest."""
    powers = [1 << bit for bit in range(_STEP.bit_length())]
    sizes = {*SMALL_SIZES, *powers, *range(2 * _STEP, max_batch_size, _STEP)}
    return sorted({size for size in sizes if size < max_batch_size} | {max_batch_size})


def report(sizes: list[int], *, took_s: float, used_bytes: int) -> str:
    """Return the log line about a warm-up with the graphs of these batch sizes."""
    named = ", ".join(map(str, sizes))
    took = f"{took_s:.1f} s and {used_bytes / 2**20:.0f} MiB of GPU memory"
    return f"the warm-up with CUDA graphs for decode batches of {named} took {took}"


def reason(error: Exception) -> str:
    """Return an error as one line."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def capture_full_graph(original: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """``CUDAGraphRunner._capture_full_graph``: the step is computed without a graph where none can be captured.

    LMDeploy binds the step's metadata to the graph's buffers before it captures: that is taken back.
    """

    def _capture_full_graph(self: Any, graph_key: Any, kwargs: dict[str, Any]) -> Any:
        refused: set[Any] = self.__dict__.setdefault(_REFUSED, set())
        if graph_key in refused:
            return self._forward_eager(**kwargs)
        bound = [(each, dict(vars(each))) for each in (self.ctx_mgr.current_context(), kwargs["attn_metadata"])]
        try:
            return original(self, graph_key, kwargs)
        except Exception as error:  # noqa: BLE001 - a driver, a compiler or a kernel may raise anything
            refused.add(graph_key)
            _log.warning(
                "no CUDA graph for decode batches of %d (%s): these steps run eagerly, with a launch for each kernel",
                graph_key[0],
                reason(error),
            )
        for each, values in bound:
            vars(each).update(values)
        return self._forward_eager(**kwargs)

    return _capture_full_graph


def normalize_capture_sizes(
    original: Callable[[list[int] | None, int], list[int] | None],
) -> Callable[[list[int] | None, int], list[int] | None]:
    """``normalize_cudagraph_capture_batch_sizes``: our sizes unless the command line names some."""
    sizes_of = capture_sizes

    def normalize_cudagraph_capture_batch_sizes(capture_sizes: list[int] | None, max_batches: int) -> list[int] | None:
        return original(sizes_of(max_batches) if capture_sizes is None else capture_sizes, max_batches)

    return normalize_cudagraph_capture_batch_sizes


def agent_warmup(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """``BaseModelAgent.warmup``: log the cost of the graphs, if any were captured."""

    def warmup(self: Any) -> None:
        import torch

        free_bytes, _ = torch.cuda.mem_get_info()
        began_s = time.perf_counter()
        original(self)
        runners = getattr(self.patched_model, "_full_graph_runners", None)
        if runners and self.rank == 0:
            sizes = sorted({key[0] for key in runners})
            used_bytes = free_bytes - torch.cuda.mem_get_info()[0]
            line = report(sizes, took_s=time.perf_counter() - began_s, used_bytes=used_bytes)
            print(f"kvgate engine: {line}", file=sys.stderr, flush=True)  # noqa: T201

    return warmup
