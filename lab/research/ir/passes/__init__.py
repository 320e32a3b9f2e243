"""What makes a graph better without changing what it means: one pass a file."""

from kvcontrol.scheduler_ir.optimizer import IRPass
from kvcontrol.scheduler_ir.prefix_cache import PrefixCacheAwarePass
from lab.research.ir.passes.batching import BatchingEfficiencyPass
from lab.research.ir.passes.fuse_transfers import FuseTransfersPass
from lab.research.ir.passes.lifetime import LifetimeAwarePass
from lab.research.ir.passes.memory import MemoryAwarePreemptionPass
from lab.research.ir.passes.overlap import OverlapPass
from lab.research.ir.passes.priority import PriorityBasedPass


def all_passes() -> tuple[IRPass, ...]:
    """Return every pass, in the order in which they belong: what is cached decides what is computed, memory depends on
    the final order.
    """
    return (
        PrefixCacheAwarePass(),
        FuseTransfersPass(),
        PriorityBasedPass(),
        BatchingEfficiencyPass(),
        OverlapPass(),
        LifetimeAwarePass(),
        MemoryAwarePreemptionPass(),
    )


__all__ = [
    "BatchingEfficiencyPass",
    "FuseTransfersPass",
    "LifetimeAwarePass",
    "MemoryAwarePreemptionPass",
    "OverlapPass",
    "PriorityBasedPass",
    "all_passes",
]
