"""Replays of Mooncake's conversation trace give the hit rates that were computed independently of this code."""

import json
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest

from kvcontrol.kv_policy import make_policy
from lab.replay.belady import replay_min
from lab.replay.hits import HitRates
from lab.replay.policy import replay
from lab.traces import MOONCAKE, Request, read_trace

TRACES = Path(__file__).parents[6] / "shared" / "traces"
GOLDEN = TRACES / "mooncake" / "golden_conversation.json"

POLICIES: dict[str, tuple[str, dict[str, float]]] = {
    "LRU": ("lru", {}),
    "FIFO": ("fifo", {}),
    "LFU": ("lfu", {}),
    "ARC": ("arc", {}),
    "S3FIFO": ("s3fifo", {}),
    "S3FIFO_t1": ("s3fifo", {"threshold": 1}),
    "LRU2": ("lru2", {}),
    "MQ": ("mq", {}),
    "MQ2": ("mq", {"lifetime": 2}),
    "MIN": ("min", {}),
}
CAPACITIES = (1_000, 3_000, 5_859, 10_000, 20_000, 30_000, 50_000)
SOON = (1_000, 5_859)

pytestmark = pytest.mark.skipif(not GOLDEN.is_file(), reason="the traces are not beside this checkout")


@cache
def trace() -> list[Request]:
    return list(read_trace(TRACES / MOONCAKE))


def rates(name: str, capacity_blocks: int) -> HitRates:
    policy, parameters = POLICIES[name]
    if policy == "min":
        return replay_min(trace(), capacity_blocks=capacity_blocks)
    made = make_policy(policy, capacity_blocks=capacity_blocks, parameters=parameters)
    return replay(trace(), made, capacity_blocks=capacity_blocks)


def assert_golden(name: str, capacity_blocks: int) -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))["rates"]["conversation"][str(capacity_blocks)][name]
    assert asdict(rates(name, capacity_blocks)) == pytest.approx(golden, abs=1e-5)


@pytest.mark.parametrize("capacity_blocks", SOON)
@pytest.mark.parametrize("name", [name for name in POLICIES if name not in {"S3FIFO_t1", "MQ2"}])
def test_a_policy_hits_what_it_should(name: str, capacity_blocks: int) -> None:
    assert_golden(name, capacity_blocks)


@pytest.mark.slow
@pytest.mark.parametrize("capacity_blocks", CAPACITIES)
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_hits_what_it_should_at_every_capacity(name: str, capacity_blocks: int) -> None:
    assert_golden(name, capacity_blocks)
