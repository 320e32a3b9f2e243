"""What the hierarchy promises, over tiers of memory, step by step and with threads."""

from collections.abc import Callable, Iterator

import pytest

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.core.write_mode import WriteMode
from kvcontrol.kv_runtime import BlockStatus, Reason, SaveRequest
from tests.support.memory_tier import MemoryDisk
from tests.support.tiers import BLOCK_BYTES, Rig, config_of, path, record

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
        rig.close()


@pytest.mark.parametrize("threads", [False, True])
def test_what_was_saved_is_loaded_byte_for_byte(make: Make, threads: bool) -> None:  # noqa: FBT001
    rig = make(threads=threads)
    records = path(range(6))
    data = rig.save(records)
    end = rig.end_of(rig.hierarchy.load(rig.ids(records), range(20, 26)))
    assert [outcome.status for outcome in end.outcomes] == [BlockStatus.OK] * 6
    assert [rig.engine.contents[slot] for slot in range(20, 26)] == data


@pytest.mark.parametrize("threads", [False, True])
def test_what_left_ddr_is_loaded_from_nvme(make: Make, threads: bool) -> None:  # noqa: FBT001
    rig = make(threads=threads)
    records = path(range(6))
    data = rig.save(records)
    rig.run()
    rig.save(path(range(100, 108)), range(8, 16))
    rig.run()
    assert {rig.tiers(one) for one in records} == {"NVME"}
    end = rig.end_of(rig.hierarchy.load(rig.ids(records), range(20, 26)))
    assert end.leading_ok == 6
    assert [rig.engine.contents[slot] for slot in range(20, 26)] == data
    assert {rig.tiers(one) for one in records} == {"DDR NVME"}


def test_a_block_is_found_only_once_its_bytes_are_there(make: Make) -> None:
    rig = make()
    rig.fill([0])
    ticket = rig.hierarchy.save([SaveRequest(record(1), 0)])
    rig.poll()
    assert rig.hierarchy.find(record(1).key) is None
    rig.end_of(ticket.ticket_id)
    assert rig.hierarchy.find(record(1).key) == ticket.block_ids[0]


def test_a_block_that_is_there_is_not_copied_again(make: Make) -> None:
    rig = make()
    records = path(range(3))
    rig.save(records)
    ids = rig.ids(records)
    reads = len([what for what, _ in rig.engine.log if what == "read"])
    ticket = rig.hierarchy.save([SaveRequest(one, slot) for slot, one in enumerate(records)])
    assert list(ticket.block_ids) == ids
    assert [outcome.reason for outcome in rig.end_of(ticket.ticket_id).outcomes] == [Reason.RESIDENT] * 3
    assert len([what for what, _ in rig.engine.log if what == "read"]) == reads


def test_another_block_under_the_same_key_is_refused_with_all_after_it(make: Make) -> None:
    rig = make()
    rig.save(path([1]))
    other = path([1, 2])
    other[0] = record(1, parent=9)
    ticket = rig.hierarchy.save([SaveRequest(one, slot) for slot, one in enumerate(other)])
    assert [outcome.reason for outcome in rig.end_of(ticket.ticket_id).outcomes] == [Reason.COLLISION] * 2
    assert ticket.block_ids == (None, None)
    assert rig.hierarchy.stats().collisions == 1


def test_a_path_gets_room_from_its_head_on(make: Make) -> None:
    rig = make(nvme=0)
    rig.save(path(range(5)))
    rig.hierarchy.claims.hold(rig.ids(path(range(5))))
    ticket = rig.hierarchy.save([SaveRequest(one, slot) for slot, one in enumerate(path(range(10, 15)))])
    end = rig.end_of(ticket.ticket_id)
    assert [outcome.reason for outcome in end.outcomes] == [Reason.MOVED] * 3 + [Reason.NO_SPACE] * 2


def test_a_load_of_what_was_evicted_in_between_is_a_miss(make: Make) -> None:
    rig = make(nvme=0)
    rig.save(path(range(4)))
    ids = rig.ids(path(range(4)))
    rig.save(path(range(10, 18)))
    end = rig.end_of(rig.hierarchy.load(ids, range(4)))
    assert [outcome.reason for outcome in end.outcomes] == [Reason.NOT_RESIDENT] * 4


def test_a_flipped_byte_in_ddr_is_found_and_the_block_leaves(make: Make) -> None:
    rig = make(nvme=0)
    records = path(range(2))
    rig.save(records)
    for slot in range(rig.arena.slots):
        with rig.arena.view(slot) as view:
            view[7] ^= 1
    ids = rig.ids(records)
    end = rig.end_of(rig.hierarchy.load(ids, range(2)))
    assert [outcome.status for outcome in end.outcomes] == [BlockStatus.CORRUPT] * 2
    assert [rig.hierarchy.locate(block_id) for block_id in ids] == [(), ()]


def test_misuse_is_an_error_that_changes_nothing(make: Make) -> None:
    rig = make()
    rig.save(path([1, 2]))
    ids = rig.ids(path([1, 2]))
    with pytest.raises(ValueError, match="twice"):
        rig.hierarchy.save([SaveRequest(record(5), 0), SaveRequest(record(5), 1)])
    with pytest.raises(ValueError, match="engine slot 99"):
        rig.hierarchy.load(ids, [0, 99])
    with pytest.raises(ValueError, match="not held"):
        rig.hierarchy.claims.release(ids)
    with pytest.raises(ValueError, match="one for each"):
        rig.hierarchy.load(ids, [0])
    with pytest.raises(ValueError, match="deadline_s"):
        rig.hierarchy.load(ids, [0, 1], deadline_s=0)
    assert rig.hierarchy.stats().open_tickets == 0
    assert rig.hierarchy.claims.hold([BlockId(999)]) == ()


def test_changes_say_what_can_be_read_from_where(make: Make) -> None:
    rig = make(ddr=2)
    rig.save(path([1, 2]))
    rig.run()
    rig.save(path([3, 4]))
    rig.run()
    seen: dict[tuple[BlockId, CacheTier], bool] = {}
    for change in rig.changes:
        assert seen.get((change.block_id, change.tier), False) is not change.gained
        seen[change.block_id, change.tier] = change.gained
    there = {place for place, gained in seen.items() if gained}
    assert there == {
        (block_id, tier) for block_id in rig.ids(path([1, 2]) + path([3, 4])) for tier in rig.hierarchy.locate(block_id)
    }


def test_a_restart_finds_what_is_durable(make: Make) -> None:
    rig = make(config=config_of(write_mode=WriteMode.THROUGH))
    records = path(range(5))
    data = rig.save(records)
    rig.run()
    disk = rig.disk
    assert disk is not None
    again = MemoryDisk(capacity_blocks=16, block_bytes=BLOCK_BYTES, contents=disk.contents, seals=disk.seals)
    later = make(disk=again)
    assert sorted(found.key for _, found in later.hierarchy.recover()) == sorted(one.key for one in records)
    end = later.end_of(later.hierarchy.load(later.ids(records), range(5)))
    assert end.leading_ok == 5
    assert [later.engine.contents[slot] for slot in range(5)] == data


def test_a_tenant_whose_rest_must_stay_for_its_held_tails_gets_room_from_others() -> None:
    rig = Rig(ddr=8, nvme=0)
    large, other = path(range(5), tenant="large"), path(range(10, 13), tenant="other")
    rig.save(large)
    rig.save(other)
    rig.hierarchy.claims.hold(rig.ids(large)[1:])  # the head is free, and has to stay
    fresh = path([50], parent=4, tenant="large")
    rig.fill([0])
    ticket = rig.hierarchy.save([SaveRequest(fresh[0], 0)]).ticket_id
    assert not rig.end_of(ticket).failed
    assert rig.tiers(large[0]) == "DDR"
    assert rig.tiers(other[-1]) == ""
    rig.hierarchy.check_integrity()
    rig.hierarchy.claims.release(rig.ids(large)[1:])
    rig.close()
