"""Tiers of no memory keep the contract's promises about slots, seals and recovery."""

from collections.abc import Iterator

import pytest

from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_runtime import BlockSeal, BlockStatus, HostArena, Move
from kvcontrol.kv_runtime.backends.metadata import DurableMetadataBackend, MetadataBackend
from tests.support.tiers import record

SEAL, OTHER = BlockSeal(record(1), 7), BlockSeal(record(2), 8)


@pytest.fixture
def arena() -> Iterator[HostArena]:
    arena = HostArena(slots=4, block_bytes=1)
    yield arena
    arena.close()


def test_every_transfer_ends_well_and_at_once(arena: HostArena) -> None:
    engine = MetadataBackend(CacheTier.HBM, capacity_blocks=3, block_bytes=1)
    assert engine.read([Move(0, 0), Move(2, 3)], arena) == [BlockStatus.OK] * 2
    assert engine.write([Move(1, 1)], arena) == [BlockStatus.OK]
    assert engine.fence().wait(0)
    engine.close()


@pytest.mark.parametrize("move", [Move(3, 0, SEAL), Move(-1, 0, SEAL), Move(0, 4, SEAL)])
def test_a_slot_that_is_not_there_is_the_callers_error(arena: HostArena, move: Move) -> None:
    for backend in (
        MetadataBackend(CacheTier.HBM, capacity_blocks=3, block_bytes=1),
        DurableMetadataBackend(capacity_blocks=3, block_bytes=1),
    ):
        for call in (backend.read, backend.write):
            with pytest.raises(IndexError, match="no such slot"):
                call([move], arena)


def test_a_durable_one_tells_another_block_by_its_seal(arena: HostArena) -> None:
    disk = DurableMetadataBackend(capacity_blocks=3, block_bytes=1)
    assert disk.write([Move(1, 0, SEAL)], arena) == [BlockStatus.OK]
    assert disk.read([Move(1, 0, SEAL), Move(1, 1, OTHER), Move(2, 2, SEAL)], arena) == [
        BlockStatus.OK,
        BlockStatus.CORRUPT,
        BlockStatus.CORRUPT,
    ]
    assert disk.last_error
    with pytest.raises(ValueError, match="seal"):
        disk.write([Move(0, 0)], arena)


def test_a_durable_one_finds_again_what_was_not_erased(arena: HostArena) -> None:
    disk = DurableMetadataBackend(capacity_blocks=3, block_bytes=1)
    disk.write([Move(2, 0, OTHER), Move(1, 0, SEAL)], arena)
    assert [tuple(found) for found in disk.recover()] == [(1, SEAL), (2, OTHER)]
    assert disk.erase([1, 0]) == [BlockStatus.OK] * 2
    assert [found.slot for found in disk.recover()] == [2]
