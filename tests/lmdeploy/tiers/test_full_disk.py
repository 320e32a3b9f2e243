"""A disk that is really full under a running instance: its blocks' places are gone, and others have taken the space."""

import os
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

import pytest

from kvcontrol.core.blocks import CacheTier
from tests.support.processes import eventually
from tests.support.revisits import Answer, context
from tests.support.small_disk import small_disk
from tests.support.tiered_instance import FILE_NAME, TieredInstance

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BLOCK = 16
BLOCK_BYTES = 8192
NVME = 384
DISK_BYTES = 8 << 20
NEW_TOKENS = 8
CONTEXTS = [context(seed, 40) for seed in range(16)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", size_bytes=DISK_BYTES) as disk:
        yield disk


def asked(instance: TieredInstance) -> list[Answer]:
    return [instance.ask(text, new_tokens=NEW_TOKENS) for text in CONTEXTS]


def fill(path: Path) -> None:
    """Write a file until the disk takes no more."""
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        file.writelines(repeat(bytes(1 << 16)))


def test_a_disk_that_fills_up_costs_copies_and_is_used_again_when_it_has_room(
    tiny_llama: Path, tmp_path: Path, disk: Path
) -> None:
    settings = {
        "KVGATE_ENGINE_DDR_BYTES": str(32 * BLOCK_BYTES),
        "KVGATE_ENGINE_NVME_PATH": str(disk),
        "KVGATE_ENGINE_NVME_BYTES": str(NVME * BLOCK_BYTES),
    }
    options = ("--num-gpu-blocks", "32", "--logprobs-mode", "raw_logprobs")
    with TieredInstance.begin(tiny_llama, tmp_path, settings, *options) as instance:
        expected = asked(instance)
        eventually(lambda: instance.stats().tiers[CacheTier.NVME].cached_blocks > 32, 60, "blocks on disk")
        os.truncate(disk / FILE_NAME, 4096)  # the file had all of its space; now writing must ask for it again
        fill(disk / "others")
        for _ in range(2):
            assert [answer.tokens for answer in asked(instance)] == [answer.tokens for answer in expected]
        eventually(lambda: instance.offload.paths["ddr_to_nvme"].failed_blocks > 0, 60, "a write that found no space")
        assert os.statvfs(disk).f_bavail == 0
        (disk / "others").unlink()

        def all_restored() -> bool:
            again = asked(instance)
            assert [answer.tokens for answer in again] == [answer.tokens for answer in expected]
            return all(answer.cached == (answer.prompt - 1) // BLOCK * BLOCK for answer in again)

        eventually(all_restored, 240, "all contexts restored in full")  # a disk that was full is left alone for a while
        offload = instance.offload
        assert (offload.guard_errors, offload.worker_faults) == (0, 0)


def test_a_disk_that_is_too_small_stops_the_start_and_says_how_much_is_needed(
    tiny_llama: Path, tmp_path: Path, disk: Path
) -> None:
    settings = {
        "KVGATE_ENGINE_DDR_BYTES": str(32 * BLOCK_BYTES),
        "KVGATE_ENGINE_NVME_PATH": str(disk),
        "KVGATE_ENGINE_NVME_BYTES": str(4096 * BLOCK_BYTES),
    }
    instance = TieredInstance.begin(tiny_llama, tmp_path, settings)
    process = instance.instance
    assert process is not None
    try:
        assert process.process.wait(240) != 0
    finally:
        instance.kill()
    said = process.output()
    assert str(disk / FILE_NAME) in said
    assert "are free" in said
