"""Policies are made by name, and what isn't allowed is refused with what is."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy import (
    POLICIES,
    AdaptivePolicy,
    ArcPolicy,
    CostAwarePolicy,
    EvictionPolicy,
    Lru2Policy,
    MqPolicy,
    PolicyContext,
    PolicyError,
    PredictivePolicy,
    QosPolicy,
    S3FifoPolicy,
    make_policy,
)
from kvcontrol.kv_policy.allowed import MOST_CAPACITY_BLOCKS


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_made_empty_under_its_name(name: str) -> None:
    policy = make_policy(name, capacity_blocks=1)
    assert policy.name == name
    assert len(policy) == 0


@pytest.mark.parametrize("name", POLICIES)
def test_every_default_is_within_its_bounds(name: str) -> None:
    kind = POLICIES[name]
    assert kind.values({}) == {name: bounds.default for name, bounds in kind.parameters.items()}
    assert kind.values(kind.values({})) == kind.values({})


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(PolicyError, match="unknown policy 'lur'; known: lru, fifo, lfu, arc, s3fifo, mq, lru2"):
        make_policy("lur", capacity_blocks=10)


def test_an_unknown_parameter_is_refused_with_those_there_are() -> None:
    with pytest.raises(PolicyError, match="mq has no parameter 'life': it has lifetime, ghosts"):
        make_policy("mq", capacity_blocks=10, parameters={"life": 1})
    with pytest.raises(PolicyError, match="lru has no parameter 'life': it has none"):
        make_policy("lru", capacity_blocks=10, parameters={"life": 1})


@pytest.mark.parametrize(
    ("name", "parameter", "value"),
    [
        ("mq", "lifetime", 0),
        ("mq", "ghosts", float("nan")),
        ("mq", "ghosts", 10**400),
        ("mq", "ghosts", "1"),
        ("s3fifo", "threshold", 1.5),
        ("s3fifo", "small", 1),
        ("cost_aware", "frequency", True),
    ],
)
def test_a_parameter_out_of_bounds_is_refused_with_its_bounds(name: str, parameter: str, value: float) -> None:
    with pytest.raises(PolicyError, match=rf"{name}: {parameter} is .*; allowed is a .*number from .* to "):
        make_policy(name, capacity_blocks=10, parameters={parameter: value})


def test_a_capacity_of_nothing_is_refused() -> None:
    with pytest.raises(PolicyError, match="a capacity of 0 blocks; allowed is 1 or more"):
        make_policy("arc", capacity_blocks=0)


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf"), 1e308, True, "1"])
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (ArcPolicy, "a capacity of"),
        (AdaptivePolicy, "a capacity of"),
        (lambda wrong: S3FifoPolicy(8, small=wrong), "small is"),
        (lambda wrong: S3FifoPolicy(8, threshold=wrong), "threshold is"),
        (lambda wrong: MqPolicy(8, lifetime=wrong), "lifetime is"),
        (lambda wrong: MqPolicy(8, ghosts=wrong), "ghosts is"),
        (lambda wrong: Lru2Policy(history_blocks=wrong), "history_blocks is"),
        (lambda wrong: PredictivePolicy(8, ghosts=wrong), "ghosts is"),
        (lambda wrong: PredictivePolicy(8, patience=wrong), "patience is"),
        (lambda wrong: QosPolicy(8, idle=wrong), "idle is"),
        (lambda wrong: CostAwarePolicy(frequency=wrong), "frequency is"),
    ],
)
def test_a_policy_made_by_itself_refuses_what_it_cannot_be_made_with(
    make: Callable[[Any], EvictionPolicy], named: str, wrong: object
) -> None:
    with pytest.raises(PolicyError, match=rf"^{named} .*; (it must be|allowed is) "):
        make(wrong)


@pytest.mark.parametrize("name", POLICIES)
def test_a_capacity_is_refused_or_served(name: str) -> None:
    with pytest.raises(PolicyError, match="a capacity of more than 281,474,976,710,656 blocks"):
        make_policy(name, capacity_blocks=10**400)
    for wrong in (0, -(10**400), 1.5, float("nan"), float("inf"), True, "8"):
        with pytest.raises(PolicyError, match=r"a capacity of .* blocks; allowed is 1 or more, a whole number"):
            make_policy(name, capacity_blocks=cast("int", wrong))
    policy = make_policy(name, capacity_blocks=MOST_CAPACITY_BLOCKS)
    policy.requested((1, 2), block_tokens=16, prompt_tokens=32)
    policy.insert((BlockId(1), BlockId(2)), (1, 2))
    context = PolicyContext(tier=CacheTier.HBM, wanted_blocks=1, used_blocks=2, capacity_blocks=MOST_CAPACITY_BLOCKS)
    assert len(policy.select_victims(context).victims) == 1
