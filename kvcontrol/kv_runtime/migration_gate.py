"""Decides whether a demotion pays: gives measurements to the migration policy."""

from collections.abc import Sequence
from typing import Final

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.hashing import TOKEN_BYTES
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy.cost_benefit import CostBenefitModel, Migration
from kvcontrol.kv_policy.migration import MigrationDecision, MigrationPolicy
from kvcontrol.kv_runtime.migrator import KVMigrator
from kvcontrol.kv_runtime.record import BlockRecord

_HBM: Final = CacheTier.HBM


class MigrationGate:
    """Belongs to the tiers' owner; nothing changes but the policy's counts."""

    def __init__(
        self, policy: MigrationPolicy, costs: CostBenefitModel, migrator: KVMigrator, *, block_bytes: int
    ) -> None:
        self.policy = policy
        self._costs = costs
        self._migrator = migrator
        self._block_bytes = block_bytes

    def plan(
        self,
        way: tuple[CacheTier, CacheTier],
        records: Sequence[BlockRecord],
        block_ids: Sequence[BlockId],
    ) -> MigrationDecision:
        """Decide over blocks of these records; ids may be missing where they have none yet. O(blocks)."""
        src_tier, dst_tier = way
        migration = Migration(
            src_tier=src_tier,
            dst_tier=dst_tier,
            block_ids=block_ids,
            blocks=len(records),
            tokens=sum([len(record.tokens) for record in records]) // TOKEN_BYTES,
            size_bytes=len(records) * self._block_bytes,
        )
        estimate = self._costs.evaluate_migration(
            migration,
            transfer_s=self._migrator.seconds_for(src_tier, dst_tier, len(records)),
            load_s=self._migrator.seconds_for(dst_tier, _HBM, len(records)),
        )
        return self.policy.plan(migration, estimate)

    def break_even_blocks(self, tier: CacheTier, *, block_tokens: int) -> float | None:
        """Return from how many blocks on a load from a tier beats computing; see ``CostBenefitModel``."""
        first_s = self._migrator.seconds_for(tier, _HBM, 1)
        second_s = self._migrator.seconds_for(tier, _HBM, 2)
        more_s = None if first_s is None or second_s is None else max(0.0, second_s - first_s)  # they are two looks
        return self._costs.break_even_blocks(block_tokens=block_tokens, first_s=first_s, more_s=more_s)

    def ways_back(self, *, block_tokens: int) -> tuple[float | None, float | None]:
        """Return the seconds that computing a block takes, and those that loading it from DDR does, as measured lately;
        None for what nobody has measured. O(1).
        """
        return self._costs.prefill.seconds_for(block_tokens), self._migrator.seconds_for(CacheTier.DDR, _HBM, 1)
