"""Which prefixes are already computed, and where."""

from kvcontrol.prefix_reuse.chain import PromptChain
from kvcontrol.prefix_reuse.entry import EntryId, Insertion, Lease, LeaseId, PrefixEntry, PrefixHit
from kvcontrol.prefix_reuse.fleet import FleetIndex, Run
from kvcontrol.prefix_reuse.index import PrefixReuseIndex
from kvcontrol.prefix_reuse.keys import BlockKeys
from kvcontrol.prefix_reuse.match import PrefixMatch, ResidencyIndex
from kvcontrol.prefix_reuse.matcher import PrefixMatcher
from kvcontrol.prefix_reuse.metrics import PrefixReuseMetrics, PrefixReuseReport
from kvcontrol.prefix_reuse.naive import NaiveFleetIndex
from kvcontrol.prefix_reuse.naive_index import NaivePrefixReuseIndex
from kvcontrol.prefix_reuse.protocol import PrefixIndex

__all__ = [
    "BlockKeys",
    "EntryId",
    "FleetIndex",
    "Insertion",
    "Lease",
    "LeaseId",
    "NaiveFleetIndex",
    "NaivePrefixReuseIndex",
    "PrefixEntry",
    "PrefixHit",
    "PrefixIndex",
    "PrefixMatch",
    "PrefixMatcher",
    "PrefixReuseIndex",
    "PrefixReuseMetrics",
    "PrefixReuseReport",
    "PromptChain",
    "ResidencyIndex",
    "Run",
]
