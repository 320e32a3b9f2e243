"""Which prefixes are already computed, and where."""

from kvcontrol.prefix_reuse.chain import PromptChain
from kvcontrol.prefix_reuse.fleet import FleetIndex, Run
from kvcontrol.prefix_reuse.match import PrefixMatch, ResidencyIndex
from kvcontrol.prefix_reuse.metrics import PrefixReuseMetrics, PrefixReuseReport

__all__ = [
    "FleetIndex",
    "PrefixMatch",
    "PrefixReuseMetrics",
    "PrefixReuseReport",
    "PromptChain",
    "ResidencyIndex",
    "Run",
]
