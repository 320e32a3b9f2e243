"""The prefix index says what its naive twin says, never serves other tokens' blocks, and never makes a reader wait."""

import threading
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from kvcontrol.core import BlockHash, CacheIdentity, IdentityError, WireError, token_bytes
from kvcontrol.prefix_reuse import (
    BlockKeys,
    EntryId,
    LeaseId,
    NaivePrefixReuseIndex,
    PrefixHit,
    PrefixReuseIndex,
)
from kvcontrol.prefix_reuse.dump import Contents, HeldBlock, HeldEntry, encode

SIZE = 4
IDENTITY = CacheIdentity(model="m", revision="r", kv_dtype="float32", block_size_tokens=SIZE)


def weak_chain(parent: BlockHash, tokens: bytes, block_size_tokens: int) -> list[BlockHash]:
    """A chained hash of four bits: collisions are certain."""
    width = block_size_tokens * 4
    hashes = []
    current: bytes = parent
    for start in range(0, len(tokens) - width + 1, width):
        current = bytes([blake2b(current + tokens[start : start + width], digest_size=1).digest()[0] & 15])
        hashes.append(BlockHash(current))
    return hashes


def prompt(*blocks: int, tail: int = 0) -> bytes:
    """Packed tokens: each number is one block of that token, then ``tail`` loose tokens."""
    return token_bytes([block for block in blocks for _ in range(SIZE)] + [9] * tail)


def make(capacity: int = 8, **options: object) -> PrefixReuseIndex:
    return PrefixReuseIndex(BlockKeys(IDENTITY, **options), capacity_blocks=capacity)  # type: ignore[arg-type]


def test_the_longest_held_prefix_is_found_and_the_rest_is_counted() -> None:
    index = make()
    index.insert(prompt(1, 2, 3), [10, 11, 12])
    hit = index.lookup(prompt(1, 2, 7, tail=1))
    assert (hit.matched_length, hit.remaining_tokens, hit.kv_block_ids) == (8, 5, (10, 11))
    assert hit.confidence < 1.0
    assert index.matcher.verify(hit, prompt(1, 2, 7, tail=1)).confidence == 1.0


@pytest.mark.parametrize("tokens", [b"", prompt(tail=3)], ids=["empty", "shorter than a block"])
def test_a_prompt_without_a_full_block_is_a_plain_miss(tokens: bytes) -> None:
    index = make()
    assert index.lookup(tokens).is_miss
    assert index.insert(tokens, []).entry is None
    assert index.acquire(tokens).hit.matched_length == 0


def test_a_prompt_of_exactly_one_block_is_held_whole() -> None:
    index = make()
    index.insert(prompt(1), [5])
    assert index.lookup(prompt(1)).remaining_tokens == 0


def test_equal_blocks_at_different_depths_are_different_blocks() -> None:
    index = make()
    index.insert(prompt(1, 1, 1), [10, 11, 12])
    assert index.lookup(prompt(1, 1)).kv_block_ids == (10, 11)
    assert len(index) == 3


def test_every_inserted_entry_that_a_prompt_starts_with_is_found_shortest_first() -> None:
    index = make()
    index.insert(prompt(1), [1], metadata={"name": "system"})
    index.insert(prompt(1, 2, 3), [1, 2, 3])
    found = index.lookup_all(prompt(1, 2, 3, 4))
    assert [entry.token_length for entry in found] == [4, 12]
    assert found[0].metadata == {"name": "system"}


def test_block_ids_must_be_one_for_each_full_block() -> None:
    with pytest.raises(ValueError, match="1 kv_block_ids for 2 full blocks"):
        make().insert(prompt(1, 2), [1])


def test_blocks_held_under_another_id_are_handed_back() -> None:
    index = make()
    index.insert(prompt(1, 2), [10, 11])
    assert index.insert(prompt(1, 2, 3), [20, 21, 22]).redundant_block_ids == (20, 21)
    assert index.lookup(prompt(1, 2, 3)).kv_block_ids == (10, 11, 22)


def test_tails_leave_before_heads_and_the_least_recently_used_first() -> None:
    index = make(capacity=4)
    index.insert(prompt(1, 2), [10, 11])
    index.insert(prompt(5, 6), [20, 21])
    index.lookup(prompt(1, 2))
    assert index.insert(prompt(7), [30]).evicted_block_ids == (21,)
    assert index.evict_lru(9) == (20, 11, 10, 30)


def test_what_is_pinned_stays_and_an_insertion_without_room_says_so() -> None:
    index = make(capacity=2)
    entry = index.insert(prompt(1, 2), [10, 11]).entry
    assert entry is not None
    index.pin(entry.entry_id)
    refused = index.insert(prompt(3), [30])
    assert (refused.entry, refused.redundant_block_ids) == (None, (30,))
    assert index.evict_lru(5) == ()
    index.unpin(entry.entry_id)
    assert index.evict_lru(5) == (11, 10)
    with pytest.raises(KeyError, match="is not held"):
        index.pin(entry.entry_id)


def test_unpinning_what_is_not_pinned_is_refused() -> None:
    index = make()
    entry = index.insert(prompt(1), [1]).entry
    assert entry is not None
    with pytest.raises(ValueError, match="is not pinned"):
        index.unpin(entry.entry_id)


def test_a_lease_keeps_its_blocks_until_it_is_released_and_is_released_once() -> None:
    index = make()
    index.insert(prompt(1, 2), [10, 11])
    lease = index.acquire(prompt(1, 2, 3))
    assert lease.hit.kv_block_ids == (10, 11)
    assert index.evict_lru(5) == ()
    index.release(lease.lease_id)
    with pytest.raises(KeyError, match="is not held"):
        index.release(lease.lease_id)
    assert index.evict_lru(5) == (11, 10)


def test_invalidating_a_block_takes_all_below_it_also_what_is_leased() -> None:
    index = make()
    index.insert(prompt(1, 2, 3), [10, 11, 12])
    index.insert(prompt(1, 5), [10, 15])
    lease = index.acquire(prompt(1, 2))
    key = index.lookup(prompt(1, 2)).block_hashes[1]
    assert sorted(index.invalidate(key)) == [11, 12]
    assert index.invalidate(key) == ()
    index.insert(prompt(1, 2), [10, 50])
    index.release(lease.lease_id)
    index.check_integrity()
    assert index.lookup(prompt(1, 2)).kv_block_ids == (10, 50)


def test_invalidating_a_pinned_entry_frees_what_it_pinned_above() -> None:
    index = make(capacity=3)
    entry = index.insert(prompt(1, 2, 3), [10, 11, 12]).entry
    assert entry is not None
    index.pin(entry.entry_id)
    index.invalidate(entry.token_hash)
    index.check_integrity()
    assert index.evict_lru(9) == (11, 10)


def test_a_hit_on_a_block_that_was_computed_anew_elsewhere_is_cut_off() -> None:
    index = make()
    index.insert(prompt(1), [10])
    hit = index.lookup(prompt(1))
    index.evict_lru(1)
    index.insert(prompt(2), [10])
    index.insert(prompt(1), [11])
    assert index.matcher.verify(hit, prompt(1)).is_miss


def test_many_prefixes_of_one_long_prompt_are_noted_once_each() -> None:
    index = make(capacity=4_000)
    long = prompt(*range(3_000))
    index.insert(long, range(3_000))
    keys = index.keys.of(long)
    for depth in range(1, 3_000):
        index.lookup_keys(keys[:depth], depth * SIZE)
    index.insert(prompt(5_000), [3_000])
    index.check_integrity()
    assert index.evict_lru(2) == (2_999, 2_998)


def test_inserting_again_counts_nothing_as_inserted() -> None:
    index = make()
    for _ in range(3):
        index.insert(prompt(1, 2), [1, 2])
    assert index.report().inserted_blocks == 2


def test_tenants_share_nothing_unless_a_prefix_is_shared_by_name() -> None:
    index = make()
    index.insert(prompt(1, 2), [1, 2], salt="a")
    assert index.lookup(prompt(1, 2), salt="b").is_miss
    assert index.keys.share("house rules", prompt(7, 7, tail=2)) == 2
    index.insert(prompt(7, 7, 1), [71, 72, 3], salt="a")
    assert index.lookup(prompt(7, 7, 1), salt="b").kv_block_ids == (71, 72)
    assert index.lookup(prompt(7, 7, 1), salt="a").kv_block_ids == (71, 72, 3)
    index.keys.unshare("house rules")
    assert index.lookup(prompt(7, 7, 1), salt="b").is_miss


def test_the_longest_shared_prefix_counts() -> None:
    keys = BlockKeys(IDENTITY)
    keys.share("short", prompt(1))
    keys.share("long", prompt(1, 2))
    assert keys.of(prompt(1, 2, 3), salt="a")[:2] == keys.of(prompt(1, 2), salt="b")
    assert keys.of(prompt(1, 5), salt="a")[0] == keys.of(prompt(1), salt="b")[0]
    assert keys.of(prompt(1, 5), salt="a")[1] != keys.of(prompt(1, 5), salt="b")[1]


@pytest.mark.parametrize(
    ("name", "tokens", "message"),
    [("", prompt(1), "empty"), ("x", prompt(1), "taken"), ("y", prompt(tail=3), "at least one block of 4")],
)
def test_a_shared_prefix_needs_a_free_name_and_a_full_block(name: str, tokens: bytes, message: str) -> None:
    keys = BlockKeys(IDENTITY)
    keys.share("x", prompt(5))
    with pytest.raises(IdentityError, match=message):
        keys.share(name, tokens)


def test_unsharing_an_unknown_name_lists_the_known_ones() -> None:
    keys = BlockKeys(IDENTITY)
    keys.share("x", prompt(5))
    with pytest.raises(IdentityError, match="no shared prefix is named 'z'; shared are: x"):
        keys.unshare("z")


def test_a_forced_collision_is_counted_and_never_serves_the_other_prompts_blocks() -> None:
    index = make(hasher=lambda _, tokens, size: [BlockHash(b"same")] * (len(tokens) // (size * 4)))
    index.insert(prompt(1), [10])
    hit = index.lookup(prompt(2))
    assert hit.kv_block_ids == (10,)  # by hash alone it looks right: which is why its confidence is below 1
    assert index.matcher.verify(hit, prompt(2)).is_miss
    assert index.acquire(prompt(2)).hit.is_miss
    refused = index.insert(prompt(2), [20])
    assert (refused.entry, refused.redundant_block_ids) == (None, (20,))
    assert index.report().collisions == 3
    assert index.matcher.verify(index.lookup(prompt(1)), prompt(1)).kv_block_ids == (10,)


def test_a_hit_whose_blocks_are_gone_by_now_is_cut_off_by_verification() -> None:
    index = make()
    index.insert(prompt(1, 2, 3), [10, 11, 12])
    hit = index.lookup(prompt(1, 2, 3))
    index.evict_lru(1)
    verified = index.matcher.verify(hit, prompt(1, 2, 3))
    assert (verified.kv_block_ids, verified.matched_length, verified.remaining_tokens) == ((10, 11), 8, 4)
    assert index.report().collisions == 0


def test_the_report_counts_requests_blocks_and_tokens() -> None:
    index = make()
    index.insert(prompt(1, 2), [1, 2])
    index.lookup(prompt(1, 2, 3, tail=2))
    index.lookup(prompt(9))
    index.evict_lru(1)
    report = index.report()
    assert (report.request_hit_rate, report.block_hit_rate, report.token_hit_rate) == (0.5, 2 / 4, 8 / 18)
    assert report.matched_blocks == {4: 1, 1: 1}
    assert (report.inserted_blocks, report.evicted_blocks) == (2, 1)
    assert 0 < report.lookup_p50_s <= report.lookup_p99_s


def test_rates_are_unknown_before_the_first_lookup() -> None:
    report = make().report()
    assert (report.request_hit_rate, report.block_hit_rate, report.token_hit_rate) == (None, None, None)
    assert report.lookup_p50_s == 0.0


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_capacity_must_be_positive(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"capacity_blocks is {capacity}"):
        make(capacity)


class TestDump:
    """What is dumped comes back, and what is damaged doesn't."""

    def filled(self) -> PrefixReuseIndex:
        index = make()
        pinned = index.insert(prompt(1, 2), [10, 11], metadata={"name": "system"}).entry
        assert pinned is not None
        index.pin(pinned.entry_id)
        index.insert(prompt(1, 3), [10, 13])
        index.insert(prompt(5, 6), [20, 21])
        index.lookup(prompt(1, 3))
        return index

    def test_blocks_ages_entries_and_pins_come_back(self) -> None:
        index = self.filled()
        again = PrefixReuseIndex.load(index.dump(), BlockKeys(IDENTITY), capacity_blocks=8)
        again.check_integrity()
        assert again.lookup_all(prompt(1, 2))[0].metadata == {"name": "system"}
        assert again.evict_lru(9) == index.evict_lru(9) == (21, 20, 13)

    def test_a_smaller_index_keeps_the_youngest(self) -> None:
        again = PrefixReuseIndex.load(self.filled().dump(), BlockKeys(IDENTITY), capacity_blocks=3)
        assert again.evict_lru(9) == (13,)

    def test_pinned_blocks_that_dont_fit_are_an_error(self) -> None:
        with pytest.raises(ValueError, match="2 pinned blocks don't fit into capacity_blocks = 1"):
            PrefixReuseIndex.load(self.filled().dump(), BlockKeys(IDENTITY), capacity_blocks=1)

    def test_any_flipped_or_missing_byte_is_noticed(self) -> None:
        data = self.filled().dump()
        for place in range(len(data)):
            with pytest.raises(WireError):
                PrefixReuseIndex.load(
                    data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :], BlockKeys(IDENTITY), capacity_blocks=8
                )
            with pytest.raises(WireError):
                PrefixReuseIndex.load(data[:place], BlockKeys(IDENTITY), capacity_blocks=8)

    @pytest.mark.parametrize(
        ("blocks", "order", "entries"),
        [
            ([HeldBlock(b"a", -7, b"x" * 16, 1)], [], []),
            ([HeldBlock(b"a", -1, b"x" * 16, 1), HeldBlock(b"a", -1, b"x" * 16, 2)], [], []),
            ([HeldBlock(b"a", -1, b"short", 1)], [], []),
            ([HeldBlock(b"a", -1, b"x" * 16, 1)], [1], []),
            ([HeldBlock(b"a", -1, b"x" * 16, 1)], [0], [HeldEntry(-1, {}, 0)]),
            ([HeldBlock(b"a", -1, b"x" * 16, 1)], [0], [HeldEntry(0, {}, 1 << 40)]),
        ],
        ids=["parent", "twice", "tokens", "order", "tail", "pins"],
    )
    def test_contents_that_no_index_has_are_refused(
        self, blocks: list[HeldBlock], order: list[int], entries: list[HeldEntry]
    ) -> None:
        data = encode(Contents(identity=IDENTITY, blocks=blocks, oldest_first=order, entries=entries))
        with pytest.raises(WireError, match="contradicts itself"):
            PrefixReuseIndex.load(data, BlockKeys(IDENTITY), capacity_blocks=8)

    @pytest.mark.parametrize("capacity", [0, -1])
    def test_a_capacity_must_be_positive(self, capacity: int) -> None:
        with pytest.raises(ValueError, match=f"capacity_blocks is {capacity}"):
            PrefixReuseIndex.load(self.filled().dump(), BlockKeys(IDENTITY), capacity_blocks=capacity)

    def test_another_identity_is_refused(self) -> None:
        other = CacheIdentity(model="m", revision="other", kv_dtype="float32", block_size_tokens=SIZE)
        with pytest.raises(IdentityError, match="other"):
            PrefixReuseIndex.load(self.filled().dump(), BlockKeys(other), capacity_blocks=8)


prompts = st.lists(st.integers(1, 3), max_size=5).flatmap(
    lambda blocks: st.integers(0, 2).map(lambda tail: prompt(*blocks, tail=tail))
)
salts = st.sampled_from(["", "a", "b"])


class IndexMachine(RuleBasedStateMachine):
    """Any order of calls gives the index and its naive twin the same answers."""

    entries = Bundle("entries")
    leases = Bundle("leases")

    @initialize(capacity=st.integers(1, 9), weak=st.booleans())
    def start(self, capacity: int, weak: bool) -> None:  # noqa: FBT001
        options = {"hasher": weak_chain} if weak else {}
        self.index = make(capacity, **options)
        self.oracle = NaivePrefixReuseIndex(BlockKeys(IDENTITY, **options), capacity_blocks=capacity)  # type: ignore[arg-type]
        self.next_block = 0

    @rule(tokens=prompts, salt=salts)
    def lookup(self, tokens: bytes, salt: str) -> None:
        assert _by_hash(self.index.lookup(tokens, salt=salt)) == _by_hash(self.oracle.lookup(tokens, salt=salt))
        assert self.index.lookup_all(tokens, salt=salt) == self.oracle.lookup_all(tokens, salt=salt)

    @rule(tokens=prompts, salt=salts, target=entries)
    def insert(self, tokens: bytes, salt: str) -> object:
        ids = range(self.next_block, self.next_block + len(tokens) // (SIZE * 4))
        self.next_block += len(ids)
        ours = self.index.insert(tokens, ids, salt=salt)
        assert ours == self.oracle.insert(tokens, ids, salt=salt)
        return ours.entry.entry_id if ours.entry is not None else multiple()

    @rule(entry=entries, up=st.booleans())
    def pin(self, entry: EntryId, up: bool) -> None:  # noqa: FBT001
        outcomes = []
        for index in (self.index, self.oracle):
            try:
                index.pin(entry) if up else index.unpin(entry)
                outcomes.append("done")
            except (KeyError, ValueError) as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]

    @rule(tokens=prompts, salt=salts, target=leases)
    def acquire(self, tokens: bytes, salt: str) -> LeaseId:
        ours, theirs = self.index.acquire(tokens, salt=salt), self.oracle.acquire(tokens, salt=salt)
        assert ours == theirs
        return ours.lease_id

    @rule(lease=consumes(leases))
    def release(self, lease: LeaseId) -> None:
        self.index.release(lease)
        self.oracle.release(lease)

    @rule(tokens=prompts, salt=salts)
    def invalidate(self, tokens: bytes, salt: str) -> None:
        for key in self.index.keys.of(tokens, salt=salt)[-1:]:
            assert sorted(self.index.invalidate(key)) == sorted(self.oracle.invalidate(key))

    @rule(blocks=st.integers(0, 4))
    def evict(self, blocks: int) -> None:
        assert self.index.evict_lru(blocks) == self.oracle.evict_lru(blocks)

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "index"):
            self.index.check_integrity()
            assert len(self.index) == len(self.oracle)


def _by_hash(hit: PrefixHit) -> tuple[int, int, tuple[int, ...]]:
    return hit.matched_length, hit.remaining_tokens, hit.kv_block_ids


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def test_readers_and_writers_at_once_see_only_prefixes_that_were_there() -> None:
    index = make(capacity=64)
    stop = threading.Event()
    failures: list[str] = []

    def write(salt: str) -> None:
        step = 0
        while not stop.is_set():
            step += 1
            blocks = [step % 5, step % 7, step % 3]
            index.insert(prompt(*blocks), [block * 10 + place for place, block in enumerate(blocks)], salt=salt)
            if step % 4 == 0:
                index.evict_lru(3)

    def read(salt: str) -> None:
        step = 0
        while not stop.is_set():
            step += 1
            blocks = [step % 5, step % 7, step % 3]
            tokens = prompt(*blocks)
            hit = index.matcher.verify(index.lookup(tokens, salt=salt), tokens)
            if (
                list(hit.kv_block_ids)
                != [block * 10 + place for place, block in enumerate(blocks)][: len(hit.kv_block_ids)]
            ):
                failures.append(f"{blocks} gave {hit.kv_block_ids}")
            lease = index.acquire(tokens, salt=salt)
            index.release(lease.lease_id)

    threads = [threading.Thread(target=work, args=(salt,)) for work in (write, read, read) for salt in ("a", "b")]
    for thread in threads:
        thread.start()
    stop.wait(1.5)
    stop.set()
    for thread in threads:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    index.check_integrity()


def test_a_reader_does_not_wait_for_a_writer_that_holds_the_lock() -> None:
    index = make()
    index.insert(prompt(1), [10])
    with index._lock:
        found: list[PrefixHit] = []
        reader = threading.Thread(target=lambda: found.append(index.lookup(prompt(1))))
        reader.start()
        reader.join(timeout=30)
        assert found
        assert found[0].kv_block_ids == (10,)


calls_at_once = st.lists(
    st.tuples(prompts, salts, st.sampled_from(["insert", "lookup", "acquire", "evict", "invalidate"])), max_size=60
)


def _what_is_wrong(index: PrefixReuseIndex, tokens: bytes, salt: str, call: str) -> str | None:
    """Make one call on an index whose block ids follow from the keys, and say what was served wrongly."""
    keys = index.keys.of(tokens, salt=salt)
    right = tuple(int.from_bytes(key[:6], "big") for key in keys)
    served: tuple[int, ...] = ()
    match call:
        case "insert":
            index.insert(tokens, right, salt=salt)
        case "lookup":
            served = index.matcher.verify(index.lookup(tokens, salt=salt), tokens).kv_block_ids
        case "acquire":
            lease = index.acquire(tokens, salt=salt)
            served = lease.hit.kv_block_ids
            index.release(lease.lease_id)
        case "evict":
            index.evict_lru(2)
        case "invalidate" if keys:
            index.invalidate(keys[0])
    return None if served == right[: len(served)] else f"{call} gave {served} for {right}"


@settings(max_examples=25, deadline=None)
@given(calls_at_once)
def test_any_calls_from_several_threads_leave_a_sound_index_that_serves_only_right_blocks(
    calls: list[tuple[bytes, str, str]],
) -> None:
    index = make(capacity=6)
    wrong: list[str | None] = []
    threads = [
        threading.Thread(target=lambda mine: wrong.extend(_what_is_wrong(index, *each) for each in mine), args=(part,))
        for part in (calls[0::3] * 3, calls[1::3] * 3, calls[2::3] * 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert not any(wrong)
    index.check_integrity()
    index.evict_lru(100)
    assert len(index) == 0


def test_a_prompt_of_a_million_tokens_is_held_and_found() -> None:
    identity = CacheIdentity(model="m", revision="r", kv_dtype="float32", block_size_tokens=16)
    index = PrefixReuseIndex(BlockKeys(identity), capacity_blocks=100_000)
    tokens = token_bytes(range(1_000_000))
    index.insert(tokens, range(62_500))
    assert index.matcher.verify(index.lookup(tokens), tokens).matched_length == 1_000_000
    assert index.lookup(tokens[4:]).is_miss
    assert index.evict_lru(62_500) == tuple(range(62_499, -1, -1))


@pytest.mark.slow
def test_ten_million_blocks_pass_through_a_bounded_index() -> None:
    identity = CacheIdentity(model="m", revision="r", kv_dtype="float32", block_size_tokens=1)
    index = PrefixReuseIndex(BlockKeys(identity), capacity_blocks=100_000)
    for start in range(0, 10_000_000, 1_000):
        index.insert(token_bytes(range(start, start + 1_000)), range(start, start + 1_000))
    assert len(index) == 100_000
    assert index.lookup(token_bytes(range(9_999_000, 10_000_000))).matched_length == 1_000
    assert index.lookup(token_bytes(range(1_000))).is_miss
    index.check_integrity()
