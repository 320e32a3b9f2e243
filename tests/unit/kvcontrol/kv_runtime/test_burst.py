"""A tenant at its burst: what it brings takes the place of its own blocks, and nothing goes for what can't come."""

import random
from collections.abc import Callable, Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.watermarks import Watermarks
from kvcontrol.core.write_mode import WriteMode
from kvcontrol.kv_runtime import (
    BlockRecord,
    BlockStatus,
    LaneName,
    Loss,
    Reason,
    SaveRequest,
    TenantQuota,
)
from tests.support.tiers import BLOCK_BYTES, Rig, config_of, path

DDR, NVME = CacheTier.DDR, CacheTier.NVME
BURST = 4
A, B = path(range(4)), path(range(10, 14))

Make = Callable[..., Rig]


@pytest.fixture
def make() -> Iterator[Make]:
    rigs: list[Rig] = []

    def build(*, burst: int = BURST, tier: CacheTier = DDR, **arguments: object) -> Rig:
        rig = Rig(**arguments)  # type: ignore[arg-type]
        rigs.append(rig)
        rig.quotas.set("tenant", tier, TenantQuota(burst_bytes=burst * BLOCK_BYTES))
        return rig

    yield build
    for rig in rigs:
        rig.hierarchy.check_integrity()
        rig.close()


def save(rig: Rig, records: list[BlockRecord], first_slot: int = 0) -> list[Reason]:
    """Save a path as far as that goes before anything is written below, and say how each block ended."""
    slots = range(first_slot, first_slot + len(records))
    rig.fill(slots)
    ticket = rig.hierarchy.save([SaveRequest(*pair) for pair in zip(records, slots, strict=True)]).ticket_id
    while ticket not in rig.finished:
        rig.stepped.run_one(LaneName.HBM_TO_DDR)
        rig.poll()
    return [outcome.reason for outcome in rig.finished[ticket].outcomes]


def where(rig: Rig, records: list[BlockRecord]) -> set[str]:
    return {rig.tiers(one) for one in records}


@pytest.mark.parametrize("fault", [None, BlockStatus.FAILED, BlockStatus.NO_SPACE], ids=str)
def test_what_is_being_written_below_is_not_evicted_for_what_has_to_be_refused(
    make: Make, fault: BlockStatus | None
) -> None:
    rig = make(ddr=64)
    assert rig.disk is not None
    save(rig, A)
    assert rig.hierarchy.stats().lanes[LaneName.DDR_TO_NVME].queued_blocks == 4
    assert save(rig, B, 8) == [Reason.NO_SPACE] * 4
    assert (where(rig, A), where(rig, B)) == ({"DDR"}, {""})
    rig.disk.fail_writes = [] if fault is None else [fault] * 4
    rig.run()
    assert where(rig, A) == {"DDR NVME" if fault is None else "DDR"}
    assert Reason.NO_SPACE not in save(rig, B, 8)
    assert (where(rig, A), where(rig, B)) == ({"NVME" if fault is None else ""}, {"DDR"})


def test_of_what_is_being_written_and_what_is_not_the_latter_makes_way(make: Make) -> None:
    rig = make(ddr=64, config=config_of(write_mode=WriteMode.SECOND_USE))
    save(rig, A)
    rig.run()
    demotion = rig.hierarchy.demote(rig.ids(A[:2]))
    assert save(rig, B, 8) == [Reason.MOVED, Reason.MOVED, Reason.NO_SPACE, Reason.NO_SPACE]
    assert [rig.tiers(one) for one in A] == ["DDR", "DDR", "", ""]
    assert not rig.end_of(demotion).failed
    assert where(rig, A[:2]) == {"DDR NVME"}


def test_what_a_peer_reads_is_not_evicted_for_what_has_to_be_refused(make: Make) -> None:
    rig = make(ddr=64, nvme=0)
    save(rig, A)
    lent = rig.hierarchy.exchange.lend([one.key for one in A])
    assert save(rig, B, 8) == [Reason.NO_SPACE] * 4
    assert where(rig, A) == {"DDR"}
    rig.hierarchy.exchange.back(lent)
    assert save(rig, B, 8) == [Reason.MOVED] * 4
    assert where(rig, A) == {""}


def test_what_a_load_that_was_given_up_still_reads_is_not_evicted_for_what_has_to_be_refused(make: Make) -> None:
    rig = make(ddr=64, nvme=0)
    save(rig, A)
    load = rig.hierarchy.load(rig.ids(A), range(20, 24))

    def give_up() -> None:
        rig.hierarchy.cancel(load)
        rig.poll()
        rig.hierarchy.save([SaveRequest(one, 8 + place) for place, one in enumerate(B)])
        assert where(rig, A) == {"DDR"}

    rig.engine.during = give_up
    rig.stepped.run_one(LaneName.DDR_TO_HBM)
    rig.run()
    assert where(rig, A) == {"DDR"}


def test_a_tenant_that_saves_more_than_its_burst_beside_a_slow_disk_keeps_its_burst_full(make: Make) -> None:
    rig = make(burst=20, ddr=64, nvme=64, hbm=64)
    for turn in range(12):
        save(rig, path(range(100 * turn, 100 * turn + 5)), 0)
        if turn % 3 == 2:
            rig.stepped.run_one(LaneName.DDR_TO_NVME)
            rig.poll()
    assert rig.quotas.usage(DDR)["tenant"].used_blocks == 20


def test_a_burst_that_shrinks_takes_nothing_for_a_save_that_it_refuses_and_is_kept_in_the_end(make: Make) -> None:
    rig = make(burst=8, ddr=64, nvme=0)
    save(rig, A)
    save(rig, B, 8)
    held = rig.hierarchy.claims.hold(rig.ids(A))
    rig.quotas.set("tenant", DDR, TenantQuota(burst_bytes=2 * BLOCK_BYTES))
    assert rig.hierarchy.save([SaveRequest(path([50])[0], 20)]).block_ids == (None,)
    assert (where(rig, A), where(rig, B)) == ({"DDR"}, {"DDR"})
    rig.run()
    assert (where(rig, A), where(rig, B)) == ({"DDR"}, {""})
    rig.hierarchy.claims.release(held)
    rig.run()
    assert rig.quotas.usage(DDR)["tenant"].used_blocks == 2


@pytest.mark.parametrize("fault", [BlockStatus.FAILED, BlockStatus.NO_SPACE])
def test_a_block_that_can_not_be_written_back_stays_as_long_as_nobody_needs_its_slot(
    make: Make, fault: BlockStatus
) -> None:
    rig = make(burst=64, config=config_of(write_mode=WriteMode.BACK, ddr=Watermarks(high=0.8, low=0.4)))
    assert rig.disk is not None
    rig.disk.fail_writes = [fault] * 4
    records = path(range(1, 8))
    save(rig, records)
    rig.run()
    assert where(rig, records) == {"DDR"}
    rig.clock.pass_by(60)
    rig.run()
    assert [rig.tiers(one) for one in records].count("NVME") == 4
    assert "" not in where(rig, records)


@given(
    burst=st.integers(1, 10),
    steps=st.lists(
        st.tuples(st.sampled_from(["save", "write", "fail", "lend", "back"]), st.integers(1, 6)), max_size=30
    ),
    mode=st.sampled_from([WriteMode.THROUGH, WriteMode.SECOND_USE]),
)
def test_in_any_order_a_tenant_never_has_less_after_a_save_than_before(
    burst: int, steps: list[tuple[str, int]], mode: WriteMode
) -> None:
    rig = Rig(ddr=64, nvme=64, hbm=64, config=config_of(write_mode=mode))
    assert rig.disk is not None
    rig.quotas.set("tenant", DDR, TenantQuota(burst_bytes=burst * BLOCK_BYTES))
    chooser, names, lent, saved = random.Random(3), 0, [], []  # noqa: S311 - reproducible, not secret
    for what, size in steps:
        match what:
            case "save":
                before, there = rig.quotas.usage(DDR).get("tenant"), rig.hierarchy.stats().tiers[DDR].losses
                records = path(range(names, names + size))
                names += size
                ended = save(rig, records)
                used = rig.quotas.usage(DDR)["tenant"].used_blocks if before or Reason.MOVED in ended else 0
                lost = rig.hierarchy.stats().tiers[DDR].losses
                evicted = sum(lost.get(loss, 0) - there.get(loss, 0) for loss in (Loss.EVICTED, Loss.EVICTED_LAST))
                assert evicted <= ended.count(Reason.MOVED)
                assert (0 if before is None else before.used_blocks) <= used <= burst
                saved.append(records)
            case "write":
                rig.stepped.run_one(LaneName.DDR_TO_NVME)
                rig.poll()
            case "fail":
                rig.disk.fail_writes = [BlockStatus.FAILED] * size
            case "lend" if saved:
                lent.append(rig.hierarchy.exchange.lend([one.key for one in chooser.choice(saved)]))
            case "back" if lent:
                rig.hierarchy.exchange.back(lent.pop(0))
        rig.hierarchy.check_integrity()
    for each in lent:
        rig.hierarchy.exchange.back(each)
    rig.run()
    rig.hierarchy.check_integrity()
    rig.close()
