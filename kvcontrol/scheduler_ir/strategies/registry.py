"""The strategies that ship, by name, each made with parameters that are checked first."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from kvcontrol.core.shown import shown
from kvcontrol.kv_policy.allowed import PolicyError
from kvcontrol.kv_policy.registry import Parameter, Values, checked
from kvcontrol.scheduler_ir.strategies.adaptive import AdaptiveOrder
from kvcontrol.scheduler_ir.strategies.aegaeon import AegaeonOrder
from kvcontrol.scheduler_ir.strategies.aged import DEFAULT_AGEING_BOUND_S, AgedQueue
from kvcontrol.scheduler_ir.strategies.fifo import FifoOrder
from kvcontrol.scheduler_ir.strategies.hybrid import HybridOrder
from kvcontrol.scheduler_ir.strategies.order import Order
from kvcontrol.scheduler_ir.strategies.priority import DEFAULT_PREFILL_WEIGHT_S, PriorityOrder
from kvcontrol.scheduler_ir.strategies.slo_aware import SloAwareOrder

DEFAULT_STRATEGY = "priority"
"""What an instance begins with where nobody says otherwise."""
_AGEING = {
    "ageing_bound_s": Parameter(
        default=DEFAULT_AGEING_BOUND_S,
        least=0.001,
        most=86400,
        meaning="waiting time after which a request precedes all that waited less, in seconds",
    )
}
_PATIENCE = {
    "patience_s": Parameter(
        default=10, least=0, most=86400, meaning="seconds that count as the deadline of a request without one"
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyKind:
    """One strategy that ships: how it is made, and what may be set."""

    name: str
    summary: str
    order: Callable[[Values], Order]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    def values(self, given: Mapping[str, float]) -> Values:
        """Return all parameters, defaults where nothing is given; raises ``PolicyError``."""
        return checked(f"strategy {self.name}", {**self.parameters, **_AGEING}, given)

    def make(self, values: Values) -> AgedQueue:
        """Return an empty queue; ``values`` are all parameters, checked."""
        own = {name: value for name, value in values.items() if name not in _AGEING}
        return AgedQueue(self.order(own), ageing_bound_s=values["ageing_bound_s"])


_KINDS = (
    StrategyKind(name="fifo", summary="came first", order=lambda _: FifoOrder()),
    StrategyKind(
        name="priority",
        summary="the highest class; within it by arrival and by how little of the prompt is to be computed",
        order=lambda values: PriorityOrder(**values),
        parameters={
            "prefill_weight_s": Parameter(
                default=DEFAULT_PREFILL_WEIGHT_S,
                least=0,
                most=3600,
                meaning="seconds of waiting that 1,000 uncached prompt tokens weigh; 0: first come, first served",
            )
        },
    ),
    StrategyKind(
        name="slo_aware",
        summary="the earliest deadline that can still be met",
        order=lambda values: SloAwareOrder(**values),
        parameters=_PATIENCE,
    ),
    StrategyKind(
        name="adaptive",
        summary="priority, slo_aware or hybrid, by how fast the queue drains and how many deadlines are missed",
        order=lambda values: AdaptiveOrder(**values),
        parameters={
            "dwell_s": Parameter(default=2, least=0, most=3600, meaning="seconds that an order is followed at least")
        },
    ),
    StrategyKind(
        name="aegaeon",
        summary="groups of one adapter and prefix, by when they were opened",
        order=lambda values: AegaeonOrder(group_size=int(values["group_size"])),
        parameters={
            "group_size": Parameter(default=8, least=1, most=4096, meaning="requests that a group takes", whole=True)
        },
    ),
    StrategyKind(
        name="hybrid",
        summary="class, deadline and cached prefix in one sum of seconds",
        order=lambda values: HybridOrder(**values),
        parameters=_PATIENCE
        | {
            "class_s": Parameter(default=10, least=0, most=86400, meaning="seconds that a class is worth"),
            "locality_s": Parameter(
                default=2, least=0, most=86400, meaning="seconds that a prefix which was used lately is worth"
            ),
        },
    ),
)

STRATEGIES: Mapping[str, StrategyKind] = MappingProxyType({kind.name: kind for kind in _KINDS})
"""All that ship, by name."""


def make_strategy(name: str, parameters: Mapping[str, float] = MappingProxyType({})) -> AgedQueue:
    """Return an empty queue; raises ``PolicyError``."""
    kind = STRATEGIES.get(name)
    if kind is None:
        raise PolicyError(f"unknown strategy {shown(name)}; known: {', '.join(STRATEGIES)}")
    return kind.make(kind.values(parameters))
