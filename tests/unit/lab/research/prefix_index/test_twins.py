"""The fast index and its naive twin say the same, whatever happens, one thing after the other or all at once."""

import sys
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from lab.research.prefix_index import ages, index, keys, matcher, node, tree
from lab.research.prefix_index.entry import EntryId, LeaseId
from lab.research.prefix_index.index import PrefixReuseIndex
from lab.research.prefix_index.keys import BlockKeys
from lab.research.prefix_index.naive_index import NaivePrefixReuseIndex
from tests.support.examples import examples
from tests.support.interleaving import TurnLock, Turns
from tests.support.journal import READS, WRITES, Journal, Step
from tests.support.prefixes import IDENTITY, SIZE, prompt, prompts, salts, weak_chain

MODULES = (ages, index, keys, matcher, node, tree)

steps = st.tuples(st.sampled_from([*READS, *READS, *WRITES, "insert", "insert"]), prompts, salts)
scripts = st.lists(st.lists(steps, max_size=8), min_size=2, max_size=3)
seeds = st.integers(0, 1 << 32)


def twins(capacity: int, *, weak: bool = False) -> tuple[PrefixReuseIndex, NaivePrefixReuseIndex]:
    block_keys = BlockKeys(IDENTITY, hasher=weak_chain) if weak else BlockKeys(IDENTITY)
    return (
        PrefixReuseIndex(block_keys, capacity_blocks=capacity, clock=_no_time),
        NaivePrefixReuseIndex(block_keys, capacity_blocks=capacity, clock=_no_time),
    )


def _no_time() -> float:
    return 0.0


def take_turns(fast: PrefixReuseIndex, twin: NaivePrefixReuseIndex, parts: list[list[Step]], seed: int) -> None:
    """Run scripts at once, interleaved as the seed says, and judge them."""
    twin.evict_lru(0)
    real = fast._lock
    lock = TurnLock()
    journal = Journal(fast, lock)
    lock.turns = Turns(seed, MODULES)
    lock.turns.run([journal.player(part) for part in parts])
    lock.turns = None
    journal.judge(twin)
    fast.check_integrity()
    fast._lock = real


class TwinMachine(RuleBasedStateMachine):
    """Any order of calls, and any interleaving of several threads' calls, gives both the same answers."""

    entries = Bundle("entries")
    leases = Bundle("leases")

    @initialize(capacity=st.integers(1, 9), weak=st.booleans())
    def start(self, capacity: int, weak: bool) -> None:  # noqa: FBT001
        self.capacity = capacity
        self.weak = weak
        self.fast, self.twin = twins(capacity, weak=weak)
        self.next_block = 0
        self.inserted: list[tuple[bytes, str]] = []

    @rule(tokens=prompts, salt=salts)
    def lookup(self, tokens: bytes, salt: str) -> None:
        hit = self.fast.lookup(tokens, salt=salt)
        assert hit == self.twin.lookup(tokens, salt=salt)
        assert self.fast.lookup_all(tokens, salt=salt) == self.twin.lookup_all(tokens, salt=salt)
        assert self.fast.matcher.verify(hit, tokens) == self.twin.matcher.verify(hit, tokens)

    @rule(tokens=prompts, salt=salts, blocks=st.integers(0, 5))
    def lookup_keys(self, tokens: bytes, salt: str, blocks: int) -> None:
        some = self.fast.keys.of(tokens, salt=salt)[:blocks]
        assert self.fast.lookup_keys(some, len(some) * SIZE) == self.twin.lookup_keys(some, len(some) * SIZE)
        for key in some:
            assert self.fast.lineage_of(key) == self.twin.lineage_of(key)

    @rule(again=st.lists(st.integers(1, 4), max_size=6))
    def lookups(self, again: list[int]) -> None:
        """Of what was inserted lately, with no writer between them."""
        for tokens, salt in [self.inserted[-place] for place in again if place <= len(self.inserted)]:
            assert self.fast.lookup(tokens, salt=salt) == self.twin.lookup(tokens, salt=salt)

    @rule(tokens=prompts, salt=salts, target=entries)
    def insert(self, tokens: bytes, salt: str) -> object:
        ids = range(self.next_block, self.next_block + len(tokens) // (SIZE * 4))
        self.next_block += len(ids)
        self.inserted.append((tokens, salt))
        ours = self.fast.insert(tokens, ids, salt=salt, metadata={"salt": salt})
        assert ours == self.twin.insert(tokens, ids, salt=salt, metadata={"salt": salt})
        return ours.entry.entry_id if ours.entry is not None else multiple()

    @rule(entry=entries, up=st.booleans())
    def pin(self, entry: EntryId, up: bool) -> None:  # noqa: FBT001
        outcomes = []
        for each in (self.fast, self.twin):
            try:
                each.pin(entry) if up else each.unpin(entry)
                outcomes.append("done")
            except (KeyError, ValueError) as error:
                outcomes.append(repr(error))
        assert outcomes[0] == outcomes[1]

    @rule(tokens=prompts, salt=salts, target=leases)
    def acquire(self, tokens: bytes, salt: str) -> LeaseId:
        ours, theirs = self.fast.acquire(tokens, salt=salt), self.twin.acquire(tokens, salt=salt)
        assert ours == theirs
        return ours.lease_id

    @rule(lease=consumes(leases))
    def release(self, lease: LeaseId) -> None:
        outcomes = []
        for each in (self.fast, self.twin):
            try:
                each.release(lease)
                outcomes.append("done")
            except KeyError as error:  # a lease of before a restart
                outcomes.append(repr(error))
        assert outcomes[0] == outcomes[1]

    @rule(tokens=prompts, salt=salts)
    def invalidate(self, tokens: bytes, salt: str) -> None:
        for key in self.fast.keys.of(tokens, salt=salt)[-1:]:
            assert sorted(self.fast.invalidate(key)) == sorted(self.twin.invalidate(key))

    @rule(blocks=st.integers(0, 4))
    def evict(self, blocks: int) -> None:
        assert self.fast.evict_lru(blocks) == self.twin.evict_lru(blocks)

    @rule(name=st.sampled_from(["x", "y"]), tokens=prompts)
    def share(self, name: str, tokens: bytes) -> None:
        """Both have the same keys."""
        if name in self.fast.keys._shared:
            self.fast.keys.unshare(name)
        elif len(tokens) >= SIZE * 4:
            self.fast.keys.share(name, tokens)

    @rule(capacity=st.integers(1, 9))
    def restart(self, capacity: int) -> None:
        """Each from what the *other* wrote; a capacity that pins don't fit into is refused by both."""
        data = self.fast.dump(), self.twin.dump()
        assert data[0] == data[1]
        block_keys = self.fast.keys
        try:
            fast = PrefixReuseIndex.load(data[1], block_keys, capacity_blocks=capacity, clock=_no_time)
        except ValueError as error:
            with pytest.raises(ValueError, match=str(error)):
                NaivePrefixReuseIndex.load(data[0], block_keys, capacity_blocks=capacity)
            return
        self.fast = fast
        self.twin = NaivePrefixReuseIndex.load(data[0], block_keys, capacity_blocks=capacity, clock=_no_time)

    @rule(parts=scripts, seed=seeds)
    def at_once(self, parts: list[list[Step]], seed: int) -> None:
        if not self.weak:  # a weak hash is for one thread: what a look-up may find depends on the tokens then
            take_turns(self.fast, self.twin, parts, seed)

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "fast"):
            self.fast.check_integrity()
            self.twin.check_integrity()
            assert len(self.fast) == len(self.twin)

    def teardown(self) -> None:
        if hasattr(self, "fast"):
            ours, theirs = self.fast.report(), self.twin.report()
            for name in ("collisions", "inserted_blocks", "evicted_blocks", "invalidated_blocks", "entries"):
                assert getattr(ours, name) == getattr(theirs, name), name
            assert self.fast.evict_lru(100) == self.twin.evict_lru(100)


TestTwinMachine = TwinMachine.TestCase
TestTwinMachine.settings = settings(max_examples=examples(80), stateful_step_count=30, deadline=None, print_blob=True)


@settings(max_examples=examples(150), deadline=None, print_blob=True)
@given(parts=scripts, seed=seeds, capacity=st.integers(1, 9))
def test_any_interleaving_of_threads_is_one_after_the_other_to_the_twin(
    parts: list[list[Step]], seed: int, capacity: int
) -> None:
    fast, twin = twins(capacity)
    take_turns(fast, twin, parts, seed)
    fast.check_integrity()
    assert fast.evict_lru(100) == twin.evict_lru(100)


RACES: dict[str, tuple[list[Step], list[Step]]] = {
    "an invalidation": ([("lookup", prompt(1, 2, 3), "")] * 3, [("invalidate", prompt(1, 2), "")]),
    "an invalidation and a new insertion": (
        [("verify", prompt(1, 2, 3), "")] * 2,
        [("invalidate", prompt(1), ""), ("insert", prompt(1, 2, 3), "")],
    ),
    "three writers while it stands still": (
        [("verify", prompt(1, 2), ""), ("lookup", prompt(1, 2), "")],
        [("invalidate", prompt(1), ""), ("insert", prompt(1, 2), ""), ("evict", prompt(1), "")],
    ),
    "invalidations of the same block": (
        [("invalidate", prompt(1, 2), "")] * 3,
        [("invalidate", prompt(1, 2), ""), ("insert", prompt(1, 2), ""), ("evict", prompt(1), "")],
    ),
    "an eviction": ([("verify", prompt(1, 2, 3), "")] * 2, [("evict", prompt(0, 0), "")]),
    "an insertion that evicts": ([("lookup", prompt(1, 2, 3), "")] * 2, [("insert", prompt(4, 5), "")]),
    "an invalidation of what is acquired": (
        [("acquire", prompt(1, 2, 3), ""), ("lookup_all", prompt(1, 2, 3), "")],
        [("invalidate", prompt(1), "")],
    ),
}


@pytest.mark.parametrize(("reader", "writer"), RACES.values(), ids=RACES.keys())
@pytest.mark.parametrize("seed", range(60))
def test_a_look_up_may_race_with(reader: list[Step], writer: list[Step], seed: int) -> None:
    fast, twin = twins(4)
    for each in (fast, twin):
        each.insert(prompt(1, 2, 3), [1, 2, 3])
    take_turns(fast, twin, [reader, writer], seed)


@pytest.fixture
def _hasty() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_hasty")
@pytest.mark.parametrize("seed", range(6))
def test_free_running_threads_are_one_after_the_other_to_the_twin_too(seed: int) -> None:
    """Scripts by seed; which interleaving comes up is the machine's, but each must be right."""
    import random

    chosen = random.Random(seed)  # noqa: S311 - scripts
    names = [*READS, *READS, *WRITES, "insert", "insert"]
    parts: list[list[Step]] = [
        [
            (
                chosen.choice(names),
                prompt(*[chosen.randint(1, 3) for _ in range(chosen.randint(0, 5))]),
                chosen.choice(["", "a"]),
            )
            for _ in range(60)
        ]
        for _ in range(4)
    ]
    fast, twin = twins(7)
    journal = Journal(fast, threading.Lock())
    threads = [threading.Thread(target=journal.player(part)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    journal.judge(twin)
    fast.check_integrity()


def test_the_same_seed_gives_the_same_interleaving() -> None:
    def seen(seed: int) -> list[str]:
        fast, _ = twins(4)
        lock = TurnLock()
        journal = Journal(fast, lock)
        lock.turns = Turns(seed, MODULES)
        part: list[Step] = [("insert", prompt(1, 2), ""), ("lookup", prompt(1, 2), ""), ("evict", prompt(1), "")]
        lock.turns.run([journal.player(part), journal.player(part), journal.player(part)])
        return [f"{call.name} {call.window} {call.answer}" for call in journal.calls]

    assert seen(3) == seen(3)
    assert len({"\n".join(seen(seed)) for seed in range(20)}) > 5
