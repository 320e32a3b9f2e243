"""What the tiers of an engine say of themselves, in the words of ``/kv/v1`` and ``/metrics``."""

from engines.control import tier_metrics
from engines.control.tier_metrics import TierCounts
from engines.lmdeploy.offload.tiers import EngineTiers
from kvcontrol import tier_report
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.control import OffloadStats, TierStats
from kvcontrol.kv_runtime.block_file import padded


def tier_stats(tiers: EngineTiers) -> dict[CacheTier, TierStats]:
    """Return the state of every tier below HBM; any thread."""
    return {} if tiers.hierarchy is None else tier_report.tier_stats(tiers.hierarchy)


def tier_counts(tiers: EngineTiers) -> dict[CacheTier, TierCounts]:
    """Return what the tiers below HBM found and whose they are, for ``/metrics``; any thread."""
    if tiers.hierarchy is None or tiers.planner is None:
        return {}
    block_tokens = tiers.planner.identity.block_size_tokens
    return tier_metrics.tier_counts(tiers.hierarchy, block_tokens=block_tokens, padded=padded)


def offload_stats(tiers: EngineTiers) -> OffloadStats | None:
    """Return what the tiers did so far, None before they were started; any thread."""
    hierarchy, agent, planner = tiers.hierarchy, tiers.agent, tiers.planner
    if hierarchy is None or agent is None or planner is None:
        return None
    counters = planner.counters
    return tier_report.offload_stats(
        hierarchy,
        agent,
        loads=counters.loads,
        failed_loads=counters.loads_failed,
        saves=counters.saves,
        tail_saves=counters.tail_saves,
        guard_errors=tiers.guard.errors,
        failed_saves_in_a_row=tiers.saves.failed_in_a_row,
        save_failure=tiers.saves.failure,
        block_tokens=planner.identity.block_size_tokens,
    )
