"""Slots are somebody's or nobody's, and what is found is what a naive cache would find."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engines.sim.pool import PrefixPool
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockHash
from kvcontrol.kv_policy import make_policy
from tests.support.examples import examples
from tests.support.simulated import Mirror, chain

CAPACITY = 12
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=8)


class PoolMachine(RuleBasedStateMachine):
    """Requests that take blocks, cache some of them, and go, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.mirror = Mirror()
        self.pool = PrefixPool(
            capacity_blocks=CAPACITY,
            block_tokens=4,
            policy=make_policy("lru", capacity_blocks=CAPACITY),
            sink=self.mirror,
        )
        self.open: list[tuple[Sequence[BlockHash], int, list[int]]] = []

    @rule(contents=PATHS, tail=st.integers(0, 2))
    def come(self, contents: list[int], tail: int) -> None:
        path = chain(contents)
        hit = self.pool.cached.leading(path.keys, len(path.keys))
        self.pool.use(path.keys[:hit])
        before = self.pool.available_blocks
        slots = self.pool.take(len(path.keys) - hit + tail)
        if slots is None:
            assert before < len(path.keys) - hit + tail
            self.pool.release(path.keys[:hit])
            return
        own = len(path.keys) - hit
        self.pool.attach(path.keys, hit, len(path.keys), slots[:own], path.block_tokens)
        self.open.append((path.keys, len(path.keys), slots[own:]))

    @rule(which=st.integers(0, 50))
    def go(self, which: int) -> None:
        if self.open:
            keys, attached, own = self.open.pop(which % len(self.open))
            self.pool.release(keys[:attached])
            self.pool.give(own)

    @rule(contents=PATHS)
    def drop(self, contents: list[int]) -> None:
        """What nobody holds of a block and of all that follows it goes, and nothing else."""
        here = self.pool.cached.with_what_follows([chain(contents).keys[-1]])
        before = len(self.pool.cached)
        gone = self.pool.drop(here)
        assert gone == before - len(self.pool.cached) == sum(key not in self.pool.cached for key in here)

    @rule()
    def reset(self) -> None:
        self.pool.reset()

    @rule(name=st.sampled_from(["lru", "fifo", "s3fifo"]))
    def swap(self, name: str) -> None:
        self.pool.swap(make_policy(name, capacity_blocks=CAPACITY))

    @invariant()
    def every_slot_is_somebodys_or_nobodys(self) -> None:
        self.pool.check_integrity()
        own = sum(len(slots) for _, _, slots in self.open)
        assert self.pool.free_blocks + len(self.pool.cached) + own == CAPACITY
        held = {key for keys, attached, _ in self.open for key in keys[:attached]}
        assert self.pool.available_blocks == CAPACITY - own - len(held)

    @invariant()
    def what_is_told_is_what_is_cached(self) -> None:
        told = self.mirror.held.get(CacheTier.HBM, {})
        assert len(told) == len(self.pool.cached)
        assert all(parent is None or parent in told for parent in told.values())


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


@given(st.lists(PATHS, max_size=40))
@settings(max_examples=examples(60), deadline=None)
def test_one_request_after_another_finds_what_a_naive_lru_cache_has(paths: list[list[int]]) -> None:
    pool = PrefixPool(
        capacity_blocks=CAPACITY,
        block_tokens=4,
        policy=make_policy("lru", capacity_blocks=CAPACITY),
        sink=Mirror(),
    )
    naive: list[tuple[int, ...]] = []
    """Prefixes, the one used longest ago first."""
    for contents in paths:
        prefixes = [tuple(contents[: end + 1]) for end in range(len(contents))]
        expected = next((place for place, each in enumerate(prefixes) if each not in naive), len(prefixes))
        path = chain(contents)
        hit = pool.cached.leading(path.keys, len(path.keys))
        assert hit == expected
        pool.use(path.keys[:hit])
        slots = pool.take(len(path.keys) - hit)
        assert slots is not None
        pool.attach(path.keys, hit, len(path.keys), slots, path.block_tokens)
        pool.release(path.keys)
        naive = [each for each in naive if each not in prefixes]
        del naive[: max(0, len(naive) + len(prefixes) - CAPACITY)]
        naive += reversed(prefixes)
