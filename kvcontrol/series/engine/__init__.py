"""What an engine instance exposes beside LMDeploy's own metrics: every metric family of kvgate, once."""

from kvcontrol.series.engine import handovers, policies, process, schedule, tiers

ENGINE = (*process.PROCESS, *tiers.TIERS, *policies.POLICIES, *handovers.ALL_HANDOVERS, *schedule.SCHEDULE)

__all__ = ["ENGINE"]
