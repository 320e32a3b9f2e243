"""Cores and memory of one CPU engine."""

import os
from dataclasses import dataclass

DEFAULT_KV_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuResources:
    """``threads`` of arithmetic; ``kv_bytes`` of memory that LMDeploy sees as the device's free memory.

    LMDeploy takes ``cache_max_entry_count`` (0.8 by default) of that for KV blocks, or exactly ``num_gpu_blocks``
    blocks when that is set.
    """

    threads: int
    kv_bytes: int = DEFAULT_KV_BYTES

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"threads is {self.threads}, allowed are 1 and more")
        if self.kv_bytes < 1:
            raise ValueError(f"kv_bytes is {self.kv_bytes}, allowed are 1 and more")

    @classmethod
    def of_this_machine(cls) -> "CpuResources":
        """All cores that this process may run on."""
        return cls(threads=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
