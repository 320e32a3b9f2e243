"""The policies that ship, by name, each made for a capacity with parameters that are checked first."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from kvcontrol.core.shown import shown
from kvcontrol.kv_policy.adaptive import AdaptivePolicy
from kvcontrol.kv_policy.allowed import PolicyError, check_capacity, is_number
from kvcontrol.kv_policy.arc import ArcPolicy
from kvcontrol.kv_policy.cost_aware import CostAwarePolicy
from kvcontrol.kv_policy.eviction import EvictionPolicy
from kvcontrol.kv_policy.fifo import FifoPolicy
from kvcontrol.kv_policy.lfu import LfuPolicy
from kvcontrol.kv_policy.lru import LruPolicy
from kvcontrol.kv_policy.lru2 import Lru2Policy
from kvcontrol.kv_policy.mq import MqPolicy
from kvcontrol.kv_policy.predictive import PredictivePolicy
from kvcontrol.kv_policy.qos import QosPolicy
from kvcontrol.kv_policy.s3fifo import S3FifoPolicy

Values = Mapping[str, float]
"""A policy's parameters, all of them, each within its bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A numeric parameter; ``least`` and ``most`` are inclusive, ``whole`` allows integers only."""

    default: float
    least: float
    most: float
    meaning: str
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyKind:
    """One shipped policy: its constructor for a number of blocks, and its parameters."""

    name: str
    summary: str
    make: Callable[[int, Values], EvictionPolicy]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    def values(self, given: Mapping[str, float]) -> Values:
        """Return all parameters, defaults where nothing is given; raises ``PolicyError``."""
        return checked(f"policy {self.name}", self.parameters, given)


def checked(whose: str, parameters: Mapping[str, Parameter], given: Mapping[str, float]) -> Values:
    """Return all of ``parameters`` with defaults filled in; raises ``PolicyError`` in the name of ``whose``."""
    for name, value in given.items():
        if name not in parameters:
            there = f"it has {', '.join(parameters)}" if parameters else "it has none"
            raise PolicyError(f"{whose} has no parameter {shown(name)}: {there}")
        bounds = parameters[name]
        if not is_number(value) or not bounds.least <= value <= bounds.most or (bounds.whole and value != int(value)):
            kind = "a whole number" if bounds.whole else "a number"
            given_value = f"{value:g}" if isinstance(value, float) else shown(value)
            raise PolicyError(
                f"{whose}: {name} is {given_value}; allowed is {kind} from {bounds.least:g} to "
                f"{bounds.most:g} ({bounds.meaning})"
            )
    return {name: given.get(name, bounds.default) for name, bounds in parameters.items()}


def _s3fifo(capacity_blocks: int, values: Values) -> EvictionPolicy:
    return S3FifoPolicy(capacity_blocks, small=values["small"], threshold=int(values["threshold"]))


def _predictive(capacity_blocks: int, values: Values) -> EvictionPolicy:
    return PredictivePolicy(capacity_blocks, ghosts=values["ghosts"], patience=values["patience"])


def _mq(capacity_blocks: int, values: Values) -> EvictionPolicy:
    return MqPolicy(capacity_blocks, lifetime=values["lifetime"], ghosts=values["ghosts"])


_KINDS = (
    PolicyKind(name="lru", summary="used longest ago", make=lambda _, __: LruPolicy()),
    PolicyKind(name="fifo", summary="came first", make=lambda _, __: FifoPolicy()),
    PolicyKind(name="lfu", summary="used least often since it came", make=lambda _, __: LfuPolicy()),
    PolicyKind(
        name="arc", summary="recency and frequency, balanced by what comes back", make=lambda c, _: ArcPolicy(c)
    ),
    PolicyKind(
        name="s3fifo",
        summary="share of the small queue, which filters blocks that are used once",
        make=_s3fifo,
        parameters={
            "small": Parameter(default=0.1, least=0.01, most=0.9, meaning="share of the small queue"),
            "threshold": Parameter(
                default=2, least=1, most=3, meaning="uses that move a block to the main queue", whole=True
            ),
        },
    ),
    PolicyKind(
        name="mq",
        summary="used least often, where what isn't used for a while counts less and less",
        make=_mq,
        parameters={
            "lifetime": Parameter(
                default=1, least=0.01, most=100, meaning="accesses without a use before a block falls, in capacities"
            ),
            "ghosts": Parameter(default=4, least=0, most=100, meaning="blocks remembered, in capacities"),
        },
    ),
    PolicyKind(
        name="lru2",
        summary="second-last use longest ago",
        make=lambda _, values: Lru2Policy(history_blocks=int(values["history_blocks"])),
        parameters={
            "history_blocks": Parameter(
                default=1 << 20, least=0, most=1 << 30, meaning="blocks whose last use is remembered", whole=True
            )
        },
    ),
    PolicyKind(
        name="adaptive",
        summary="LRU, or keeps what came again for longer where shadows prove it better; never far behind LRU",
        make=lambda c, _: AdaptivePolicy(c),
    ),
    PolicyKind(
        name="predictive",
        summary="fewest uses to be expected, by how long blocks like it went without one",
        make=_predictive,
        parameters={
            "ghosts": Parameter(default=4, least=0, most=100, meaning="blocks remembered, in capacities"),
            "patience": Parameter(
                default=3, least=0.01, most=100, meaning="accesses that are looked ahead at most, in capacities"
            ),
        },
    ),
    PolicyKind(
        name="qos",
        summary="least important and oldest of the tenant that has most",
        make=lambda c, values: QosPolicy(c, idle=values["idle"]),
        parameters={
            "idle": Parameter(
                default=4,
                least=0.01,
                most=1000,
                meaning="accesses without its own until a tenant gives first, in capacities",
            )
        },
    ),
    PolicyKind(
        name="cost_aware",
        summary="cheapest to recompute or reload, for its uses",
        make=lambda _, values: CostAwarePolicy(frequency=int(values["frequency"])),
        parameters={
            "frequency": Parameter(default=1, least=0, most=1, meaning="1: uses count; 0: costs alone", whole=True)
        },
    ),
)

POLICIES: Mapping[str, PolicyKind] = MappingProxyType({kind.name: kind for kind in _KINDS})
"""All that ship, by name."""

DEFAULT_POLICY: Final = AdaptivePolicy.name
"""Chooses in every tier of an engine where nothing else is set: its guard bounds what it can find less than LRU."""


def make_policy(
    name: str, *, capacity_blocks: int, parameters: Mapping[str, float] = MappingProxyType({})
) -> EvictionPolicy:
    """Return an empty policy for a tier of ``capacity_blocks``; raises ``PolicyError``."""
    kind = POLICIES.get(name)
    if kind is None:
        raise PolicyError(f"unknown policy {shown(name)}; known: {', '.join(POLICIES)}")
    check_capacity(capacity_blocks)
    return kind.make(capacity_blocks, kind.values(parameters))
