"""Saves and demotions ask what they are worth; loads tell how wrong their estimates were."""

import time

import pytest

from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_policy import MigrationMode, Quantity
from kvcontrol.kv_runtime.backend_protocol import BlockStatus
from kvcontrol.kv_runtime.migration_gate import MigrationGate
from kvcontrol.kv_runtime.ticket import Reason
from tests.support.tiers import Rig, config_of, path

ENDLESS_TOKENS = 1_000_000_000
"""Computed in a second: nothing that moves is as quick."""


def measured(rig: Rig) -> None:
    """Let every way be measured once: time passes for the devices."""
    rig.save(path(range(4)))
    rig.run()
    rig.hierarchy.load(rig.ids(path(range(4))), [10, 11, 12, 13])
    rig.run()


def rig_of(mode: MigrationMode) -> Rig:
    return Rig(config_of(migrate=mode), ddr=16, nvme=64, threads=True)


def saves(rig: Rig, first: int, count: int = 40) -> list[Reason]:
    """Save blocks of one token each, one path at a time; returns how the first block of each ended."""
    reasons = []
    for name in range(first, first + count):
        rig.fill([0])
        rig.save(path([name]), [0])
    for finished in rig.finished.values():
        reasons += [end.reason for end in finished.ends]
    return reasons


@pytest.mark.parametrize("mode", MigrationMode)
def test_a_save_that_cannot_pay_is_declined_only_where_that_is_asked_for(mode: MigrationMode) -> None:
    rig = rig_of(mode)
    try:
        measured(rig)
        rig.hierarchy.costs.prefill.measured(ENDLESS_TOKENS, 1.0)
        reasons = saves(rig, 100)
        benefits = rig.hierarchy.stats().benefits
        assert benefits[CacheTier.HBM, CacheTier.DDR].not_worth_blocks > 0
        declined = benefits[CacheTier.HBM, CacheTier.DDR].declined_blocks
        assert (Reason.NOT_WORTH in reasons) == (mode is MigrationMode.WORTHWHILE) == (declined > 0)
        rig.run()
        rig.hierarchy.check_integrity()
    finally:
        rig.close()


def test_where_computing_is_slow_everything_is_kept() -> None:
    rig = rig_of(MigrationMode.WORTHWHILE)
    try:
        measured(rig)
        rig.hierarchy.costs.prefill.measured(1_000, 1_000.0)
        assert Reason.NOT_WORTH not in saves(rig, 100)
        assert rig.hierarchy.stats().benefits[CacheTier.HBM, CacheTier.DDR].worth_blocks > 0
    finally:
        rig.close()


def test_a_load_tells_how_wrong_its_estimate_was() -> None:
    rig = rig_of(MigrationMode.ALWAYS)
    try:
        measured(rig)
        blocks = rig.ids(path(range(4)))
        ticket = rig.hierarchy.load(blocks, [10, 11, 12, 13], expected_s=3600.0)
        assert all(outcome.status is BlockStatus.OK for outcome in rig.end_of(ticket).outcomes)
        error = rig.hierarchy.stats().errors[Quantity.LOAD]
        assert error.predictions == 1
        assert error.bias > 1
    finally:
        rig.close()


def test_a_tier_breaks_even_at_its_first_block_where_computing_is_slow() -> None:
    rig = rig_of(MigrationMode.ALWAYS)
    try:
        gate: MigrationGate = rig.hierarchy.gate
        assert gate.break_even_blocks(CacheTier.DDR, block_tokens=64) is None
        measured(rig)
        rig.hierarchy.costs.prefill.measured(1_000, 1_000.0)
        until_s = time.monotonic() + 30
        while gate.break_even_blocks(CacheTier.DDR, block_tokens=64) is None and time.monotonic() < until_s:
            measured(rig)
        assert gate.break_even_blocks(CacheTier.DDR, block_tokens=64) == 1
    finally:
        rig.close()
