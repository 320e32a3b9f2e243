"""What makes a graph better without changing what it means: one pass a file."""

from kvcontrol.scheduler_ir.passes.prefix_cache import PrefixCacheAwarePass

__all__ = ["PrefixCacheAwarePass"]
