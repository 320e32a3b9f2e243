"""The fleet in short, as operators see it before they sign in with the admin key."""

from pydantic import BaseModel, ConfigDict, Field

from gateway.placement.planner import Planner
from gateway.registry import Instance, LoadTracker, Registry
from gateway.telemetry import Outcome, Telemetry
from kvcontrol.core.roles import EngineRole
from kvcontrol.prefix_reuse import FleetIndex


class _View(BaseModel):
    model_config = ConfigDict(frozen=True)


class InstanceSummary(_View):
    """One instance in short."""

    id: str
    url: str
    role: EngineRole | None = Field(description="Role; null while unknown.")
    state: str
    reason: str
    draining: bool
    models: list[str]
    resident_blocks: dict[str, int] = Field(description="Blocks that it is known to hold, by tier.")
    in_flight: int
    running: int | None = Field(description="Requests in its own scheduler; null if not reported.")
    waiting: int | None


class FleetView(_View):
    """All instances, how they are chosen, and how requests ended since this process started."""

    policy: str
    usable: int
    outcomes: dict[str, int]
    instances: list[InstanceSummary]


class FleetBoard:
    """Reads the live objects."""

    def __init__(
        self, *, registry: Registry, load: LoadTracker, index: FleetIndex, planner: Planner, telemetry: Telemetry
    ) -> None:
        self._registry = registry
        self._load = load
        self._index = index
        self._planner = planner
        self._telemetry = telemetry

    def view(self) -> FleetView:
        """Return the fleet as it is now."""
        instances = self._registry.all()
        return FleetView(
            policy=self._planner.policy,
            usable=sum(each.ready for each in instances),
            outcomes={outcome.value: self._telemetry.outcomes.get(outcome, 0) for outcome in Outcome},
            instances=[self.summary(each) for each in instances],
        )

    def summary(self, each: Instance) -> InstanceSummary:
        stats = each.stats
        return InstanceSummary(
            id=each.id,
            url=each.url,
            role=each.known_role,
            state=each.state,
            reason=each.reason,
            draining=each.draining,
            models=[model.id for model in each.models],
            resident_blocks={str(tier): count for tier, count in self._index.blocks_held(each.id).items()},
            in_flight=self._load.of(each.id).in_flight,
            running=None if stats is None else stats.load.running,
            waiting=None if stats is None else stats.load.waiting,
        )
