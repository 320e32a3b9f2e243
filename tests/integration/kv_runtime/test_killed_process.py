"""Blocks outlive the process that saved them, however it ends."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_runtime import BlockStatus
from tests.support.tiered_process import HBM, Tiers, bytes_of

_LIMIT_S = 60.0


@pytest.mark.parametrize("after_lines", [3, 40, 400])
def test_a_killed_process_leaves_blocks_that_are_found_verified_and_used(tmp_path: Path, after_lines: int) -> None:
    command = [sys.executable, "-m", "tests.support.tiered_process", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = [process.stdout.readline().split() for _ in range(after_lines)]
        process.kill()
        process.wait(_LIMIT_S)
    assert all(len(line) == 2 for line in told)
    tiers = Tiers(tmp_path)
    found = tiers.hierarchy.recover()
    where = {tier for block_id, _ in found for tier in tiers.hierarchy.locate(block_id)}
    assert CacheTier.DDR in where
    if after_lines > 100:
        assert CacheTier.NVME in where
    tiers.hierarchy.check_integrity()
    assert len({record.key for _, record in found}) == len(found)
    right = 0
    for start in range(0, len(found), HBM // 2):
        part = found[start : start + HBM // 2]
        ticket = tiers.hierarchy.load([block_id for block_id, _ in part], range(len(part)))
        until_s = time.monotonic() + _LIMIT_S
        ends = [end for end in tiers.hierarchy.poll().finished if end.ticket_id == ticket]
        while not ends:
            assert time.monotonic() < until_s
            time.sleep(0.001)
            ends = [end for end in tiers.hierarchy.poll().finished if end.ticket_id == ticket]
        for slot, ((_, record), outcome) in enumerate(zip(part, ends[0].outcomes, strict=True)):
            if outcome.status is BlockStatus.OK:
                assert tiers.engine.contents[slot] == bytes_of(int.from_bytes(record.key, "little"))
                right += 1
    # What a transfer was about to overwrite when the process died is found out; that is a batch or two.
    assert right >= len(found) - 16
    assert right > 0
    tiers.close()
