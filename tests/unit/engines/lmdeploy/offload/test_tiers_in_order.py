"""Loads that the engine uses while their last bytes are under way: what it is told when, and what it joins when."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch")
import torch

from engines.events.log import EventLog
from engines.lmdeploy.offload.memory import EngineMemory
from engines.lmdeploy.offload.plan import LoadOrder, SaveOrder
from engines.lmdeploy.offload.tiers import Built, EngineTiers
from kvcontrol.agent import LoadPlan, SavePlan
from kvcontrol.core.blocks import CacheIdentity
from kvcontrol.kv_policy import LruPolicy
from kvcontrol.kv_runtime import (
    BlockStatus,
    HierarchyConfig,
    HierarchyManager,
    HostArena,
    QuotaManager,
    SaveRequest,
)
from tests.support.memory_tier import QueueingTier
from tests.support.tiers import record

BLOCKS, BYTES = 16, 64
IDENTITY = CacheIdentity(model="m", revision="0", kv_dtype="u8", block_size_tokens=4, tp_rank=0, tp_size=1)
_LIMIT_S = 30.0


class Rig:
    """Tiers of an engine whose device is a ``QueueingTier``; ``joined`` counts what the engine was told to wait for."""

    def __init__(self) -> None:
        self.device = QueueingTier(capacity_blocks=BLOCKS, block_bytes=BYTES)
        self.tiers = EngineTiers(pages_per_block=1, deadline_s=_LIMIT_S)
        self.tiers.register({"row": torch.zeros((BLOCKS, BYTES), dtype=torch.uint8)})
        assert self.tiers.memory is not None
        self.tiers.memory.join = self.device.join  # type: ignore[method-assign] - the device's, not the CPU pool's
        log = EventLog(block_size_tokens=4, clock=time.time, on_pending=lambda: None)
        self.tiers.start(self._build, IDENTITY, log, SimpleNamespace())

    def _build(self, memory: EngineMemory, identity: CacheIdentity) -> Built:  # noqa: ARG002
        arena = HostArena(slots=BLOCKS, block_bytes=BYTES)
        hierarchy = HierarchyManager(
            HierarchyConfig(),
            engine=self.device,
            arena=arena,
            durable=None,
            make_policy=LruPolicy,
            quotas=QuotaManager(),
        )
        return Built(hierarchy, arena, arena.close)

    def saved(self, count: int) -> tuple[Any, ...]:
        """Save so many blocks and return their ids, held as a plan holds them."""
        hierarchy = self.tiers.hierarchy
        assert hierarchy is not None
        ticket = hierarchy.save([SaveRequest(record(n), n) for n in range(count)], fence=self.device)
        assert hierarchy.drain(_LIMIT_S)
        hierarchy.poll()
        block_ids = [each for each in ticket.block_ids if each is not None]
        return hierarchy.claims.hold(block_ids)

    def load(self, count: int) -> None:
        plan = LoadPlan(first_block=0, block_ids=self.saved(count))
        self.tiers.transfers.start_loads([LoadOrder(request_id=7, plan=plan, slots=tuple(range(8, 8 + count)))])

    def collect_loads(self) -> set[int]:
        until_s = time.monotonic() + _LIMIT_S
        while not (ended := self.tiers.transfers.collect(0.01)).loads:
            assert time.monotonic() < until_s, "a load without an end"
        assert ended.invalid_slots == set()
        return ended.loads

    def rest(self) -> None:
        hierarchy = self.tiers.hierarchy
        assert hierarchy is not None
        assert hierarchy.drain(_LIMIT_S)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.device.write_gate.open()
    made.tiers.close()


def test_a_load_counts_as_ended_once_and_is_joined_by_the_next_step_that_may_read_it(rig: Rig) -> None:
    rig.device.write_gate.shut()
    rig.load(3)
    assert rig.collect_loads() == {7}, "told although the device has not done it"
    assert rig.tiers.transfers.is_busy, "the next step must get orders, or it would not join"
    assert rig.device.joins == 0
    rig.tiers.transfers.join()
    rig.tiers.transfers.join()
    assert rig.device.joins == 1
    assert not rig.tiers.transfers.is_busy
    assert cast("Any", rig.tiers.hierarchy).held(), "its blocks are kept until the device has done"
    rig.device.write_gate.open()
    rig.rest()
    assert rig.tiers.transfers.collect(0.0).loads == set(), "the step after the one that told: it looks at nothing"
    assert rig.tiers.transfers.collect(0.0).loads == set()
    assert cast("Any", rig.tiers.hierarchy).held() == []
    assert rig.tiers.guard.errors == 0


def test_a_save_joins_what_is_still_on_its_way(rig: Rig) -> None:
    rig.device.write_gate.shut()
    rig.load(2)
    rig.collect_loads()
    order = SaveOrder(
        save_id=3,
        requests=(SaveRequest(record(9), 8),),
        logical_ids=(8,),
        plan=SavePlan(places=(0,), held=(), heads_held=False),
    )
    rig.tiers.transfers.start_saves([order])
    assert rig.device.joins == 1


def test_a_load_that_has_ended_needs_no_join(rig: Rig) -> None:
    rig.device.refuses = True  # tells nothing before the end
    rig.load(3)
    assert rig.collect_loads() == {7}
    rig.tiers.transfers.join()
    assert rig.device.joins == 0


def test_a_load_that_breaks_off_after_it_was_told_is_an_error_that_is_counted(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.device.fail_writes += [BlockStatus.FAILED] * 2
    rig.device.write_gate.shut()
    rig.load(2)
    rig.collect_loads()
    rig.device.write_gate.open()
    rig.rest()
    rig.tiers.transfers.collect(0.0)
    rig.tiers.transfers.collect(0.0)
    assert rig.tiers.guard.errors == 1
    assert "broke off" in caplog.text
