"""Decides which moves are made, from the estimates of the cost model, with a reason."""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.shown import shown
from kvcontrol.kv_policy.allowed import PolicyError
from kvcontrol.kv_policy.cost_benefit import Estimate, Migration

_TRY_EVERY: Final = 16
"""Of the moves of one path that aren't worth it, one in so many is made: else nothing would ever be measured again."""


class MigrationMode(StrEnum):
    """How to treat a move whose expected cost exceeds its benefit."""

    ALWAYS = "always"
    """It is made all the same, and counted."""
    WORTHWHILE = "worthwhile"
    """It isn't made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationDecision:
    """``plan`` is the plan to carry out, None for no move; ``net_benefit_s`` is None without measurements."""

    plan: Migration | None
    net_benefit_s: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PathBenefits:
    """Of one path: blocks judged worth a move, not worth it, and so not moved; seconds that the moves should save."""

    worth_blocks: int
    not_worth_blocks: int
    declined_blocks: int
    net_benefit_s: float


class MigrationPolicy:
    """Makes moves that pay or that cannot be estimated yet; treats others by its mode. O(1) a decision."""

    def __init__(self, mode: MigrationMode = MigrationMode.ALWAYS) -> None:
        try:
            self.mode = MigrationMode(mode)
        except ValueError:
            raise PolicyError(f"mode is {shown(mode)}; allowed is {' or '.join(MigrationMode)}") from None
        self._worth: Counter[tuple[CacheTier, CacheTier]] = Counter()
        self._not_worth: Counter[tuple[CacheTier, CacheTier]] = Counter()
        self._declined: Counter[tuple[CacheTier, CacheTier]] = Counter()
        self._benefit_s: dict[tuple[CacheTier, CacheTier], float] = {}
        self._until_try: dict[tuple[CacheTier, CacheTier], int] = {}

    def plan(self, migration: Migration, estimate: Estimate | None) -> MigrationDecision:
        """Decide over one move."""
        path, blocks = (migration.src_tier, migration.dst_tier), migration.blocks
        if estimate is None:
            return MigrationDecision(plan=migration, net_benefit_s=None, reason="not measured yet")
        net_s = estimate.net_benefit_s
        if net_s > 0:
            self._worth[path] += blocks
            return self._made(migration, net_s, "worth it")
        self._not_worth[path] += blocks
        if self.mode is MigrationMode.ALWAYS:
            return self._made(migration, net_s, "not worth it, and made always")
        left = self._until_try.get(path, _TRY_EVERY) - 1
        self._until_try[path] = left or _TRY_EVERY
        if not left:
            return self._made(migration, net_s, "not worth it, and tried to see whether that still holds")
        self._declined[path] += blocks
        return MigrationDecision(plan=None, net_benefit_s=net_s, reason="not worth it")

    def benefits(self) -> dict[tuple[CacheTier, CacheTier], PathBenefits]:
        """Return the decisions for each path; any thread (numbers may then be a moment apart)."""
        return {
            path: PathBenefits(
                worth_blocks=self._worth[path],
                not_worth_blocks=self._not_worth[path],
                declined_blocks=self._declined[path],
                net_benefit_s=self._benefit_s.get(path, 0.0),
            )
            for path in dict.fromkeys([*self._worth, *self._not_worth])  # copied at once, each
        }

    def _made(self, migration: Migration, net_s: float, reason: str) -> MigrationDecision:
        path = (migration.src_tier, migration.dst_tier)
        self._benefit_s[path] = self._benefit_s.get(path, 0.0) + net_s
        return MigrationDecision(plan=migration, net_benefit_s=net_s, reason=reason)
