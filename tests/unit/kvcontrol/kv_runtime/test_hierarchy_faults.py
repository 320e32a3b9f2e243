"""What broke other tiered caches: each must end in a miss, in bounded time, with every slot accounted for."""

import gc
import random
import time
from collections.abc import Callable, Iterator
from itertools import product

import pytest

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.core.watermarks import Watermarks
from kvcontrol.core.write_mode import WriteMode
from kvcontrol.kv_runtime import (
    BlockRecord,
    BlockStatus,
    LaneName,
    Loss,
    MigratorConfig,
    Reason,
    SaveRequest,
    TicketId,
)
from tests.support.tiers import BATCH_BLOCKS, BLOCK_BYTES, Rig, config_of, path

DDR, NVME = CacheTier.DDR, CacheTier.NVME
Make = Callable[..., Rig]


@pytest.fixture
def make() -> Iterator[Make]:
    rigs: list[Rig] = []

    def build(**arguments: object) -> Rig:
        rigs.append(Rig(**arguments))  # type: ignore[arg-type]
        return rigs[-1]

    yield build
    for rig in rigs:
        rig.hierarchy.check_integrity()
        assert rig.hierarchy.stats().worker_faults == 0
        assert not rig.engine.overlaps
        rig.close()


def _saved_below(rig: Rig, count: int = 4) -> tuple[list[BlockRecord], list[BlockId], list[bytes]]:
    """Return blocks that are in NVMe alone."""
    records = path(range(1, count + 1))
    data = rig.save(records)
    rig.run()
    ids = rig.ids(records)
    rig.save(path(range(1000, 1000 + rig.arena.slots)))
    rig.run()
    assert {rig.tiers(one) for one in records} == {"NVME"}
    return records, ids, data


def _reasons(rig: Rig, ticket: TicketId) -> list[Reason]:
    return [outcome.reason for outcome in rig.end_of(ticket).outcomes]


def _requests(records: list[BlockRecord], first_slot: int = 0) -> list[SaveRequest]:
    return [SaveRequest(one, first_slot + place) for place, one in enumerate(records)]


def test_a_file_that_goes_after_the_look_up_fails_each_load_once(make: Make) -> None:
    rig = make()
    records, ids, _ = _saved_below(rig)
    assert rig.disk is not None
    rig.disk.seals.clear()
    assert _reasons(rig, rig.hierarchy.load(ids, range(4))) == [Reason.CORRUPT] * 4
    assert _reasons(rig, rig.hierarchy.load(ids, range(4))) == [Reason.NOT_RESIDENT] * 4
    assert [rig.hierarchy.find(one.key) for one in records] == [None] * 4
    assert rig.hierarchy.stats().tiers[NVME].losses[Loss.CORRUPT] == 4


def test_a_flipped_byte_on_disk_loses_that_block_alone(make: Make) -> None:
    rig = make()
    records, ids, data = _saved_below(rig)
    assert rig.disk is not None
    slot = next(slot for slot, seal in rig.disk.seals.items() if seal.record == records[2])
    rig.disk.flip(slot)
    end = rig.end_of(rig.hierarchy.load(ids, range(4)))
    assert [outcome.status for outcome in end.outcomes] == [BlockStatus.OK] * 2 + [BlockStatus.CORRUPT, BlockStatus.OK]
    assert end.leading_ok == 2
    assert rig.engine.contents[3] == data[3]
    rig.run()
    assert slot not in rig.disk.seals  # no restart finds it


def test_a_disk_that_hangs_makes_loads_late_and_nothing_wrong(make: Make) -> None:
    rig = make(threads=True)
    records, ids, data = _saved_below(rig)
    assert rig.disk is not None
    rig.disk.read_gate.shut()
    end = rig.end_of(rig.hierarchy.load(ids, range(4), deadline_s=0.05))
    assert [outcome.reason for outcome in end.outcomes] == [Reason.DEADLINE] * 4
    rig.fill(range(4))
    reused = [rig.engine.contents[slot] for slot in range(4)]
    assert [rig.hierarchy.find(one.key) for one in records] == [None] * 4
    assert _reasons(rig, rig.hierarchy.load(ids, range(4))) == [Reason.STALLED] * 4
    assert rig.hierarchy.stats().tiers[DDR].held_blocks == 4  # the device still fills their slots
    rig.disk.read_gate.open()
    rig.run()
    assert [rig.engine.contents[slot] for slot in range(4)] == reused
    assert {rig.tiers(one) for one in records} == {"DDR NVME"}
    assert rig.end_of(rig.hierarchy.load(ids, range(4))).leading_ok == 4
    assert [rig.engine.contents[slot] for slot in range(4)] == data


def test_a_save_that_was_given_up_is_never_found(make: Make) -> None:
    rig = make()
    rig.fill(range(3))
    ticket = rig.hierarchy.save(_requests(path([1, 2, 3])))

    def reuse() -> None:
        rig.hierarchy.cancel(ticket.ticket_id)
        rig.poll()
        assert [outcome.reason for outcome in rig.finished[ticket.ticket_id].outcomes] == [Reason.CANCELLED] * 3
        rig.fill(range(3))

    rig.engine.during = reuse
    rig.run()
    assert [rig.tiers(one) for one in path([1, 2, 3])] == [""] * 3
    assert rig.hierarchy.stats().tiers[DDR].free_blocks == rig.arena.slots


def test_a_cancelled_load_ends_when_the_engine_memory_is_safe(make: Make) -> None:
    rig = make(threads=True)
    rig.save(path([1, 2]))
    rig.engine.write_gate.shut()
    ticket = rig.hierarchy.load(rig.ids(path([1, 2])), [5, 6])
    assert rig.engine.write_gate.wait_for_arrival()
    rig.hierarchy.cancel(ticket)
    rig.poll()
    assert ticket not in rig.finished
    rig.engine.write_gate.open()
    assert rig.end_of(ticket).leading_ok == 2


def test_cancels_during_prefetch_lose_and_double_no_slot(make: Make) -> None:
    rig = make(threads=True)
    _, ids, _ = _saved_below(rig, 8)
    rng = random.Random(2)  # noqa: S311 - reproducible, not secret
    for turn in range(300):
        chosen = rng.sample(ids, 5)
        tickets = [rig.hierarchy.prefetch(chosen), rig.hierarchy.load(chosen, range(5))]
        if rng.random() < 0.5:
            rig.poll()
        for ticket in tickets:
            if rng.random() < 0.7:
                rig.hierarchy.cancel(ticket)
        for ticket in tickets:
            rig.end_of(ticket)
        if turn % 3 == 0:
            rig.save(path(range(2000 + 10 * turn, 2004 + 10 * turn)), range(10, 14))
        rig.hierarchy.check_integrity()


def test_five_thousand_aborts_leave_nothing(make: Make) -> None:
    rig = make()
    rig.save(path(range(1, 7)))
    rig.run()
    ids = rig.ids(path(range(1, 7)))

    def abort(turn: int) -> None:
        ticket = rig.hierarchy.save(_requests(path(range(10 * turn, 10 * turn + 3)), 8))
        load = rig.hierarchy.load(ids, range(6))
        if turn % 2:
            rig.stepped.run_one(LaneName.HBM_TO_DDR)
        rig.hierarchy.cancel(ticket.ticket_id)
        rig.hierarchy.cancel(load)
        rig.poll()
        rig.finished.clear()
        rig.changes.clear()

    for turn in range(100, 600):
        abort(turn)
    gc.collect()
    before = len(gc.get_objects())
    for turn in range(600, 5600):
        abort(turn)
    gc.collect()
    assert len(gc.get_objects()) < before + 2000
    rig.run()
    rig.hierarchy.drop()
    rig.run()
    stats = rig.hierarchy.stats()
    assert [tier.free_blocks for tier in stats.tiers.values()] == [rig.arena.slots, 16]
    assert stats.open_tickets == 0


def test_a_tier_full_of_held_blocks_refuses_at_once(make: Make) -> None:
    rig = make()
    _, below, _ = _saved_below(rig)
    full = path(range(1000, 1008))
    held = rig.hierarchy.claims.hold(rig.ids(full))
    ticket = rig.hierarchy.save(_requests(path([1, 50])))
    assert _reasons(rig, ticket.ticket_id) == [Reason.RESIDENT, Reason.NO_SPACE]
    assert _reasons(rig, rig.hierarchy.load(below, range(4))) == [Reason.NO_SPACE] * 4
    assert not any(what == "read" and slots == (50,) for what, slots in rig.engine.log)
    rig.hierarchy.claims.release(held)
    assert rig.end_of(rig.hierarchy.load(below, range(4))).leading_ok == 4


def test_holds_end_at_zero_and_never_below(make: Make) -> None:
    rig = make()
    ids: list[BlockId] = []
    rng = random.Random(4)  # noqa: S311 - reproducible, not secret
    for turn in range(200):
        records = path(range(10 * turn, 10 * turn + 3))
        ids.extend(block_id for block_id in rig.hierarchy.save(_requests(records)).block_ids if block_id is not None)
        chosen = rng.sample(ids, min(len(ids), 3))
        held = rig.hierarchy.claims.hold(chosen)
        load = rig.hierarchy.load(chosen, range(8, 8 + len(chosen)))
        rng.choice([rig.run, lambda: rig.hierarchy.cancel(load), lambda: rig.hierarchy.drop(chosen[:1])])()  # noqa: B023
        rig.hierarchy.claims.release(held)
        with pytest.raises(ValueError, match="not held"):
            rig.hierarchy.claims.release(chosen[:1])
    rig.run()
    assert [tier.held_blocks for tier in rig.hierarchy.stats().tiers.values()] == [0, 0]


def test_a_load_that_pauses_gets_its_own_bytes_whatever_else_needs_room(make: Make) -> None:
    rig = make(threads=True, hbm=64)
    _, ids, data = _saved_below(rig)
    assert rig.disk is not None
    rig.disk.read_gate.shut()
    ticket = rig.hierarchy.load(ids, range(4))
    assert rig.disk.read_gate.wait_for_arrival()
    for turn in range(20):
        rig.save(path(range(3000 + 10 * turn, 3006 + 10 * turn)), range(20, 26))
    rig.disk.read_gate.open()
    assert rig.end_of(ticket).leading_ok == 4
    assert [rig.engine.contents[slot] for slot in range(4)] == data


def test_what_nvme_evicted_is_not_claimed_after_ddr_evicts_it_too(make: Make) -> None:
    rig = make(ddr=8, nvme=4)
    first = path(range(1, 5))
    rig.save(first)
    rig.run()
    rig.save(path(range(10, 14)))
    rig.run()
    assert {rig.tiers(one) for one in first} == {"DDR"}
    rig.save(path(range(20, 28)))
    assert [rig.tiers(one) for one in first] == [""] * 4
    assert _reasons(rig, rig.hierarchy.load([BlockId(0)], [0])) == [Reason.NOT_RESIDENT]


def test_a_full_disk_costs_the_copies_below_and_is_tried_again_later(make: Make) -> None:
    rig = make(config=config_of(retry_writes_after_s=10.0))
    assert rig.disk is not None
    rig.disk.fail_writes = [BlockStatus.NO_SPACE] * 4
    first = path(range(1, 5))
    data = rig.save(first)
    rig.run()
    assert {rig.tiers(one) for one in first} == {"DDR"}
    second = path(range(10, 13))
    rig.save(second)
    rig.run()
    assert {rig.tiers(one) for one in second} == {"DDR"}
    rig.clock.pass_by(11)
    rig.run()
    assert {rig.tiers(one) for one in second} == {"DDR NVME"}
    assert rig.end_of(rig.hierarchy.load(rig.ids(first), range(4))).leading_ok == 4
    assert [rig.engine.contents[slot] for slot in range(4)] == data


def test_a_transfer_into_the_engine_that_fails_says_so(make: Make) -> None:
    rig = make()
    _, ids, _ = _saved_below(rig)
    rig.engine.fail_writes = [BlockStatus.OK, BlockStatus.FAILED]
    end = rig.end_of(rig.hierarchy.load(ids, range(4)))
    assert [outcome.status for outcome in end.outcomes] == [
        BlockStatus.OK,
        BlockStatus.FAILED,
        BlockStatus.OK,
        BlockStatus.OK,
    ]
    rig.engine.fail_reads = [BlockStatus.FAILED]
    ticket = rig.hierarchy.save(_requests(path([70, 71])))
    assert [outcome.status for outcome in rig.end_of(ticket.ticket_id).outcomes] == [BlockStatus.FAILED, BlockStatus.OK]
    assert [rig.tiers(one) for one in path([70])] == [""]


@pytest.mark.parametrize(("in_ddr", "in_nvme"), list(product([0, 2, 5], [0, 3, 6])))
def test_tiers_that_hold_different_lengths_of_a_path_give_each_block_its_own_end(
    make: Make, in_ddr: int, in_nvme: int
) -> None:
    rig = make(config=config_of(write_mode=WriteMode.SECOND_USE))
    records = path(range(1, 7))
    data = rig.save(records)
    ids = rig.ids(records)
    rig.end_of(rig.hierarchy.demote(ids[:in_nvme]))
    rig.hierarchy.claims.hold(ids[:in_ddr])
    rig.save(path(range(100, 100 + rig.arena.slots - in_ddr)), range(8, 16 - in_ddr))
    rig.hierarchy.claims.release(ids[:in_ddr])
    assert [rig.hierarchy.locate(block_id) for block_id in ids] == [
        tuple(tier for tier, length in ((DDR, in_ddr), (NVME, in_nvme)) if place < length) for place in range(6)
    ]
    end = rig.end_of(rig.hierarchy.load(ids, range(16, 22)))
    length = max(in_ddr, in_nvme)
    assert end.leading_ok == length
    assert [rig.engine.contents[slot] for slot in range(16, 16 + length)] == data[:length]
    assert {outcome.reason for outcome in end.outcomes[length:]} <= {Reason.NOT_RESIDENT}


def test_a_load_larger_than_ddr_goes_through_it(make: Make) -> None:
    for threads in (False, True):
        rig = make(ddr=6, nvme=40, hbm=64, threads=threads)
        records = path(range(1, 31))
        data: list[bytes] = []
        for first in range(0, 30, 6):
            data.extend(rig.save(records[first : first + 6]))
            rig.run()
        end = rig.end_of(rig.hierarchy.load(rig.ids(records), range(30, 60)))
        assert end.leading_ok == 30
        assert [rig.engine.contents[slot] for slot in range(30, 60)] == data


def test_a_load_joins_what_is_being_prefetched(make: Make) -> None:
    rig = make()
    _, ids, data = _saved_below(rig)
    assert rig.disk is not None
    rig.disk.log.clear()
    rig.hierarchy.prefetch(ids)
    first, second = rig.hierarchy.load(ids, range(4)), rig.hierarchy.load(ids, range(10, 14))
    assert rig.end_of(first).leading_ok == rig.end_of(second).leading_ok == 4
    assert len([what for what, _ in rig.disk.log if what == "read"]) == 1
    assert [rig.engine.contents[slot] for slot in (*range(4), *range(10, 14))] == data * 2


def test_a_slow_tier_shows_in_the_estimate(make: Make) -> None:
    rig = make(threads=True)
    records, ids, _ = _saved_below(rig, 8)
    assert rig.disk is not None
    rig.disk.during = lambda: time.sleep(0.2)
    rig.end_of(rig.hierarchy.load(ids[:BATCH_BLOCKS], range(BATCH_BLOCKS)))
    slow, fast = rig.hierarchy.estimate_load_s(ids[BATCH_BLOCKS:]), rig.hierarchy.estimate_load_s(ids[:BATCH_BLOCKS])
    assert slow is not None
    assert fast is not None
    assert slow > 0.1
    assert slow > fast
    assert rig.hierarchy.estimate_load_s([BlockId(10**6)]) is None
    assert rig.hierarchy.find(records[0].key) == ids[0]


def test_writing_back_makes_room_before_it_is_needed(make: Make) -> None:
    marks = Watermarks(high=0.8, low=0.4)
    rig = make(config=config_of(write_mode=WriteMode.BACK, ddr=marks))
    records = path(range(1, 8))
    data = rig.save(records)
    assert {rig.tiers(one) for one in records} == {"DDR"}
    rig.run()
    assert [rig.tiers(one) for one in records] == ["DDR"] * 3 + ["NVME"] * 4
    assert rig.end_of(rig.hierarchy.load(rig.ids(records), range(10, 17))).leading_ok == 7
    assert [rig.engine.contents[slot] for slot in range(10, 17)] == data


def test_a_block_that_is_asked_for_while_it_is_written_back_is_there(make: Make) -> None:
    rig = make(config=config_of(write_mode=WriteMode.BACK, ddr=Watermarks(high=0.8, low=0.4)))
    records = path(range(1, 8))
    rig.save(records)
    assert rig.hierarchy.stats().lanes[LaneName.DDR_TO_NVME].queued_blocks == 4
    ids = rig.ids(records)
    held = rig.hierarchy.claims.hold(ids[5:])
    assert rig.end_of(rig.hierarchy.load(ids, range(10, 17))).leading_ok == 7
    assert rig.disk is not None
    assert {what for what, _ in rig.disk.log} == {"write"}
    assert {rig.tiers(one) for one in records[5:]} == {"DDR NVME"}
    rig.hierarchy.claims.release(held)


def test_what_is_used_twice_is_written(make: Make) -> None:
    rig = make(config=config_of(write_mode=WriteMode.SECOND_USE))
    records = path(range(1, 5))
    rig.save(records)
    rig.run()
    assert {rig.tiers(one) for one in records} == {"DDR"}
    rig.end_of(rig.hierarchy.load(rig.ids(records)[:2], range(10, 12)))
    rig.save(records[:1])
    rig.run()
    assert [rig.tiers(one) for one in records] == ["DDR NVME"] * 2 + ["DDR"] * 2


def test_a_drain_writes_what_is_in_memory_alone(make: Make) -> None:
    rig = make(threads=True, config=config_of(write_mode=WriteMode.SECOND_USE))
    records = path(range(1, 6))
    rig.save(records)
    assert rig.hierarchy.drain(60, flush=True)
    assert {rig.tiers(one) for one in records} == {"DDR NVME"}


def test_a_drain_that_runs_out_of_time_ends_what_can_be_ended(make: Make) -> None:
    rig = make(threads=True)
    _, ids, _ = _saved_below(rig)
    assert rig.disk is not None
    rig.disk.read_gate.shut()
    ticket = rig.hierarchy.load(ids, range(4))
    assert rig.disk.read_gate.wait_for_arrival()
    assert not rig.hierarchy.drain(0.05)
    assert _reasons(rig, ticket) == [Reason.CANCELLED] * 4
    rig.disk.read_gate.open()
    assert rig.hierarchy.drain(60)


def test_more_than_may_queue_is_refused_block_by_block(make: Make) -> None:
    config = config_of(migrator=MigratorConfig(batch_bytes=BLOCK_BYTES, engine_batch_bytes=BLOCK_BYTES, queue_blocks=3))
    rig = make(config=config)
    rig.fill(range(5))
    ticket = rig.hierarchy.save(_requests(path(range(1, 6))))
    assert _reasons(rig, ticket.ticket_id) == [Reason.MOVED] * 3 + [Reason.QUEUE_FULL] * 2


def test_dropped_blocks_are_not_found_after_a_restart(make: Make) -> None:
    rig = make()
    rig.save(path(range(1, 6)))
    rig.run()
    rig.hierarchy.drop(rig.ids(path(range(1, 3))))
    rig.run()
    later = make(disk=rig.disk)
    assert sorted(one.key for _, one in later.hierarchy.recover()) == [one.key for one in path(range(1, 6))[2:]]


def test_a_tail_is_evicted_before_its_head_in_both_tiers(make: Make) -> None:
    rig = make(ddr=12, nvme=12)
    records = path(range(1, 12))  # three batches, which land one after the other
    rig.save(records)
    rig.run()
    rig.save(path(range(100, 106)))
    rig.run()
    assert [rig.tiers(one) for one in records] == ["DDR NVME"] * 6 + [""] * 5
