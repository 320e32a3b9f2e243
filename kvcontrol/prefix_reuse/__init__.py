"""Which prefixes are already computed, and where."""

from kvcontrol.prefix_reuse.fleet import FleetIndex
from kvcontrol.prefix_reuse.match import PrefixMatch, ResidencyIndex
from kvcontrol.prefix_reuse.naive import NaiveFleetIndex

__all__ = ["FleetIndex", "NaiveFleetIndex", "PrefixMatch", "ResidencyIndex"]
