"""CUDA graphs for the batch sizes that occur, and what they took at start.

A decode step runs the graph of the next larger size that was captured, with padding rows up to it. LMDeploy captures
powers of two, so that six running requests compute as eight. A few long contexts at once are the common load of an
engine: the small even sizes are captured too.
"""

import sys
import time
from collections.abc import Callable
from typing import Any, Final

SMALL_SIZES: Final = (1, 2, 4, 6, 8)
_STEP: Final = 256


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


# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def normalize_capture_sizes(
    original: Callable[[list[int] | None, int], list[int] | None],
) -> Callable[[list[int] | None, int], list[int] | None]:
    """``normalize_cudagraph_capture_batch_sizes``: where the command line names no sizes, ours."""

    def normalize_cudagraph_capture_batch_sizes(capture_sizes_: list[int] | None, max_batches: int) -> list[int] | None:
        return original(capture_sizes(max_batches) if capture_sizes_ is None else capture_sizes_, max_batches)

    return normalize_cudagraph_capture_batch_sizes


def agent_warmup(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """``BaseModelAgent.warmup``: report what the graphs took. Nothing to report where none are captured."""

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


__all__ = ["SMALL_SIZES", "agent_warmup", "capture_sizes", "normalize_capture_sizes", "report"]
