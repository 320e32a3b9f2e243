"""The eviction policies of the tiers below HBM, one a tenant in each tier, and their swaps."""

from collections.abc import Callable

from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_policy.eviction import EvictionPolicy
from kvcontrol.kv_runtime.residency import Residency
from kvcontrol.kv_runtime.tier_space import TierSpace


class TierPolicies:
    """See the module's text. Not thread-safe."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency

    def swap(self, tier: CacheTier, make_policy: Callable[[], EvictionPolicy]) -> None:
        """Swap the policies of a tier, one a tenant; all blocks stay. O(blocks).

        ``ValueError`` for a tier that isn't there. The old ones stay in charge when anything raises.
        """
        self.begin_swap(tier, make_policy)
        self.end_swap(tier)

    def begin_swap(self, tier: CacheTier, make_policy: Callable[[], EvictionPolicy]) -> None:
        """Do as ``swap`` a part at a time: ``continue_swap``, and ``end_swap`` when few blocks are missing.

        The old ones go on choosing until then, and another change of that tier's that had begun is given up.
        """
        self._of(tier).policies.begin_swap(make_policy)

    def is_swapping(self, tier: CacheTier) -> bool:
        """Whether such a change has begun."""
        return self._of(tier).policies.has_successors

    def continue_swap(self, tier: CacheTier, blocks: int) -> int:
        """Report so many more blocks to the new policies; returns how many are missing. O(``blocks`` + tenants)."""
        return self._of(tier).policies.continue_swap(blocks)

    def end_swap(self, tier: CacheTier) -> None:
        """Activate the new policies. A few steps for each block: held blocks are searched."""
        space = self._of(tier)
        space.end_swap([block for block in self._residency.blocks() if tier in block.copies])

    def _of(self, tier: CacheTier) -> TierSpace:
        space = self._residency.spaces.get(tier)
        if space is None:
            raise ValueError(f"unknown tier {tier}; known: {', '.join(self._residency.spaces)}")
        return space
