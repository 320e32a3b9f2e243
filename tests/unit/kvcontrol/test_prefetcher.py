"""Blocks of chats that are due come up from NVMe before they are asked for, and what became of them is counted."""

from collections.abc import Iterator

import pytest

from kvcontrol.agent import KVAgent
from kvcontrol.core.hashing import TOKEN_BYTES, token_bytes
from kvcontrol.core.ids import BlockHash
from kvcontrol.prefetcher import Prefetcher
from kvcontrol.prefix_reuse import PromptChain
from tests.support.tiers import Rig, path

PERIOD_S = 20.0


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(ddr=8, nvme=64)
    yield rig
    rig.hierarchy.check_integrity()
    rig.close()


def chat(number: int) -> range:
    return range(100 * number, 100 * number + 3)


def come(rig: Rig, prefetcher: Prefetcher, number: int) -> None:
    records = path(chat(number))
    prefetcher.observe([record.key for record in records])
    rig.save(records)
    rig.run()


def test_a_chat_that_is_due_is_brought_up_and_counts_as_used_when_it_comes(rig: Rig) -> None:
    prefetcher = Prefetcher(rig.hierarchy, least_probability=0.3, every_s=0.5, clock=rig.clock)
    for turn in range(60 * 4):
        come(rig, prefetcher, turn % 4)
        rig.clock.pass_by(PERIOD_S / 4)
    due = path(chat(0))
    assert rig.tiers(due[0]) == "NVME", "four chats of three blocks don't fit in DDR"
    assert prefetcher.counts.prefetched_blocks == 0
    prefetcher.work()
    rig.run()
    assert rig.tiers(due[0]) == "DDR NVME"
    assert prefetcher.counts.prefetched_blocks >= 3
    come(rig, prefetcher, 0)
    assert prefetcher.counts.used_blocks >= 3


def test_work_is_done_once_in_a_while_and_nothing_is_brought_up_that_is_there(rig: Rig) -> None:
    prefetcher = Prefetcher(rig.hierarchy, least_probability=0.01, every_s=5, clock=rig.clock)
    for turn in range(200):
        come(rig, prefetcher, turn % 2)
        rig.clock.pass_by(1)
        prefetcher.work()
        rig.run()
    counts = prefetcher.counts
    assert (counts.prefetched_blocks, counts.wasted_blocks) == (0, 0), "both chats fit in DDR"


@pytest.mark.parametrize("wrong", [{"least_probability": 0}, {"least_probability": 0.5, "every_s": 0}])
def test_what_cannot_be_is_refused(rig: Rig, wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="all must be > 0, a probability at most 1"):
        Prefetcher(rig.hierarchy, **wrong)  # type: ignore[arg-type]


def test_an_agent_tells_its_prefetcher_of_every_prompt_that_is_looked_up(rig: Rig) -> None:
    prefetcher = Prefetcher(rig.hierarchy, least_probability=0.3)
    packed = token_bytes(range(16))
    chain = PromptChain(
        BlockHash(b"r" * 16),
        block_size_tokens=4,
        source=lambda first, last: packed[first * TOKEN_BYTES : last * TOKEN_BYTES],
    )
    chain.grow(4)
    KVAgent(rig.hierarchy, prefetcher=prefetcher).plan_load(chain, 1, 3)
    assert prefetcher.lineage.blocks == 3
