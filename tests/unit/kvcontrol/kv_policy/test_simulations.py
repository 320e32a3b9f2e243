"""Independent simulations hit as often on a part of a real trace: libCacheSim, naive ones where it differs.

libCacheSim's S3-FIFO differs from the paper's text in details that matter here. A block counts as hit when it is
accessed.
"""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy import PolicyContext, make_policy
from lab.traces import MOONCAKE, read_trace

TRACES = Path(__file__).parents[5] / "shared" / "traces"
REQUESTS = 4_000
CAPACITY = 5_859
NAIVE_ACCESSES = 20_000
NAIVE_CAPACITY = 400

pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason="the traces are not beside this checkout")


@pytest.fixture(scope="module")
def accesses() -> list[BlockId]:
    requests = islice(read_trace(TRACES / MOONCAKE), REQUESTS)
    return [BlockId(block) for request in requests for block in reversed(request.block_ids)]


def hits(name: str, accesses: list[BlockId], capacity: int) -> int:
    policy = make_policy(name, capacity_blocks=capacity)
    resident: set[BlockId] = set()
    found = 0
    for block in accesses:
        if block in resident:
            found += 1
            policy.access((block,))
            continue
        if len(resident) == capacity:
            context = PolicyContext(
                tier=CacheTier.HBM,
                wanted_blocks=1,
                used_blocks=capacity,
                capacity_blocks=capacity,
                incoming=(block,),
            )
            resident.difference_update(policy.select_victims(context).victims)
        policy.insert((block,), (block,))
        resident.add(block)
    return found


@pytest.mark.parametrize(
    ("name", "kind", "parameters", "margin"),
    [
        ("lru", "LRU", {}, 0),
        ("fifo", "FIFO", {}, 0),
        ("lfu", "LFU", {}, 0),
        ("arc", "ARC", {}, 0),
        ("mq", "MQ", {"lifetime": CAPACITY}, 0.0001),
    ],
)
def test_libcachesim_hits_as_often(
    name: str, kind: str, parameters: dict[str, int], margin: float, accesses: list[BlockId]
) -> None:
    simulator: Any = pytest.importorskip("libcachesim", reason="libCacheSim is missing: pip install libcachesim")
    cache = getattr(simulator, kind)(CAPACITY, **parameters)
    request = simulator.Request()
    request.obj_size = 1
    theirs = 0
    for block in accesses:
        request.obj_id = block
        theirs += cache.get(request)
    assert hits(name, accesses, CAPACITY) == pytest.approx(theirs, abs=margin * len(accesses))
    assert theirs > 0.1 * len(accesses)


class NaiveS3Fifo:
    """Plain lists, and a small queue that goes on after main gave a block."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.room = max(1, capacity // 10)
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghosts: list[int] = []
        self.uses: dict[int, int] = {}

    def get(self, block: int) -> bool:
        if block in self.uses:
            self.uses[block] = min(3, self.uses[block] + 1)
            return True
        while len(self.uses) >= self.capacity:
            if len(self.small) >= self.room:
                self.evict_small()
            else:
                self.evict_main()
        known = block in self.ghosts
        if known:
            self.ghosts.remove(block)
        (self.main if known else self.small).append(block)
        self.uses[block] = 0
        return False

    def evict_main(self) -> None:
        while self.uses[self.main[0]]:
            self.uses[self.main[0]] -= 1
            self.main.append(self.main.pop(0))
        del self.uses[self.main.pop(0)]

    def evict_small(self) -> None:
        while self.small:
            block = self.small.pop(0)
            if self.uses[block] < 2:
                del self.uses[block]
                self.ghosts = [*self.ghosts, block][-max(1, int(0.9 * self.capacity)) :]
                return
            self.uses[block] = 0
            self.main.append(block)
            if len(self.main) > self.capacity - self.room:
                self.evict_main()


def naive_s3fifo(accesses: list[BlockId], capacity: int) -> int:
    cache = NaiveS3Fifo(capacity)
    return sum(cache.get(block) for block in accesses)


def naive_lru2(accesses: list[BlockId], capacity: int) -> int:
    times: dict[int, tuple[int, int]] = {}
    resident: set[int] = set()
    found = 0
    for now, block in enumerate(accesses, 1):
        if block in resident:
            found += 1
        elif len(resident) == capacity:
            resident.remove(min(resident, key=times.__getitem__))
        resident.add(block)
        times[block] = (times.get(block, (0, 0))[1], now)
    return found


@pytest.mark.parametrize(("name", "naive", "margin"), [("s3fifo", naive_s3fifo, 0.001), ("lru2", naive_lru2, 0)])
def test_a_naive_simulation_hits_as_often(
    name: str, naive: Callable[[list[BlockId], int], int], margin: float, accesses: list[BlockId]
) -> None:
    few = accesses[:NAIVE_ACCESSES]
    theirs = naive(few, NAIVE_CAPACITY)
    assert hits(name, few, NAIVE_CAPACITY) == pytest.approx(theirs, abs=margin * len(few))
    assert theirs > 0.02 * len(few)
