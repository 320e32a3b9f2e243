"""Hits and look-ups of each tier, by tenant."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_policy.cost_benefit import CostBenefitModel
from kvcontrol.kv_runtime.resident import Block

_DDR: Final = CacheTier.DDR
_NVME: Final = CacheTier.NVME


class TierHits:
    """Counts since the start; a block counts for the fastest tier that has it. Not thread-safe, O(1) a block."""

    def __init__(self, costs: CostBenefitModel) -> None:
        self._costs = costs
        self.by_tenant: Counter[tuple[CacheTier, str]] = Counter()

    def count(self, blocks: Sequence[Block | None]) -> None:
        """Count looked-up blocks; missing ones are no hits."""
        there = [block for block in blocks if block is not None and _DDR in block.copies]
        tenants = {block.record.tenant for block in there}
        if len(there) == len(blocks) and len(tenants) == 1:  # as nearly always
            self.by_tenant[_DDR, tenants.pop()] += len(there)
            self._costs.reused(_DDR, len(there))
            return
        self._costs.reused(_DDR, len(there))
        self._costs.reused(_NVME, sum(block is not None and block.readable for block in blocks) - len(there))
        for block in blocks:
            if block is None:
                continue
            if _DDR in block.copies:
                self.by_tenant[_DDR, block.record.tenant] += 1
            elif block.readable:
                self.by_tenant[_NVME, block.record.tenant] += 1
