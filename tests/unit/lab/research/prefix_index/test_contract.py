"""What every prefix index does: the fast one and its naive twin pass the same tests."""

import threading
from collections.abc import Callable
from hashlib import blake2b

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcontrol.core import CacheIdentity, IdentityError, WireError
from lab.research.prefix_index.dump import Contents, HeldBlock, HeldEntry, encode
from lab.research.prefix_index.index import PrefixReuseIndex
from lab.research.prefix_index.keys import BlockKeys
from lab.research.prefix_index.naive_index import NaivePrefixReuseIndex
from lab.research.prefix_index.protocol import PrefixIndex
from tests.support.examples import examples
from tests.support.prefixes import IDENTITY, SIZE, prompt, prompts, salts

Kind = type[PrefixReuseIndex] | type[NaivePrefixReuseIndex]
Make = Callable[..., PrefixIndex]


@pytest.fixture(params=[PrefixReuseIndex, NaivePrefixReuseIndex])
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


@pytest.fixture
def make(kind: Kind) -> Make:
    def made(capacity: int = 8) -> PrefixIndex:
        return kind(BlockKeys(IDENTITY), capacity_blocks=capacity)

    return made


def test_the_longest_held_prefix_is_found_and_the_rest_is_counted(make: Make) -> None:
    index = make()
    index.insert(prompt(1, 2, 3), [10, 11, 12])
    hit = index.lookup(prompt(1, 2, 7, tail=1))
    assert (hit.matched_length, hit.remaining_tokens, hit.kv_block_ids) == (8, 5, (10, 11))
    assert hit.confidence < 1.0
    assert index.matcher.verify(hit, prompt(1, 2, 7, tail=1)).confidence == 1.0


@pytest.mark.parametrize("tokens", [b"", prompt(tail=3)], ids=["empty", "shorter than a block"])
def test_a_prompt_without_a_full_block_is_a_plain_miss(tokens: bytes, make: Make) -> None:
    index = make()
    assert index.lookup(tokens).is_miss
    assert index.insert(tokens, []).entry is None
    assert index.acquire(tokens).hit.matched_length == 0


def test_a_prompt_of_exactly_one_block_is_held_whole(make: Make) -> None:
    index = make()
    index.insert(prompt(1), [5])
    assert index.lookup(prompt(1)).remaining_tokens == 0


def test_equal_blocks_at_different_depths_are_different_blocks(make: Make) -> None:
    index = make()
    index.insert(prompt(1, 1, 1), [10, 11, 12])
    assert index.lookup(prompt(1, 1)).kv_block_ids == (10, 11)
    assert len(index) == 3


def test_every_inserted_entry_that_a_prompt_starts_with_is_found_shortest_first(make: Make) -> None:
    index = make()
    index.insert(prompt(1), [1], metadata={"name": "system"})
    index.insert(prompt(1, 2, 3), [1, 2, 3])
    found = index.lookup_all(prompt(1, 2, 3, 4))
    assert [entry.token_length for entry in found] == [4, 12]
    assert found[0].metadata == {"name": "system"}


def test_block_ids_must_be_one_for_each_full_block(make: Make) -> None:
    with pytest.raises(ValueError, match="1 kv_block_ids for 2 full blocks"):
        make().insert(prompt(1, 2), [1])


def test_blocks_held_under_another_id_are_handed_back(make: Make) -> None:
    index = make()
    index.insert(prompt(1, 2), [10, 11])
    assert index.insert(prompt(1, 2, 3), [20, 21, 22]).redundant_block_ids == (20, 21)
    assert index.lookup(prompt(1, 2, 3)).kv_block_ids == (10, 11, 22)


def test_tails_leave_before_heads_and_the_least_recently_used_first(make: Make) -> None:
    index = make(capacity=4)
    index.insert(prompt(1, 2), [10, 11])
    index.insert(prompt(5, 6), [20, 21])
    index.lookup(prompt(1, 2))
    assert index.insert(prompt(7), [30]).evicted_block_ids == (21,)
    assert index.evict_lru(9) == (20, 11, 10, 30)


def test_of_several_uses_the_last_one_counts(make: Make) -> None:
    index = make()
    index.insert(prompt(1, 2), [10, 11])
    index.insert(prompt(5, 6), [20, 21])
    index.insert(prompt(7), [30])
    for blocks in ((1, 2), (5, 6), (7,), (1, 2), (5,)):
        index.lookup(prompt(*blocks))
    assert index.evict_lru(9) == (21, 30, 11, 10, 20)


def test_what_is_pinned_stays_and_an_insertion_without_room_says_so(make: Make) -> None:
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


def test_unpinning_what_is_not_pinned_is_refused(make: Make) -> None:
    index = make()
    entry = index.insert(prompt(1), [1]).entry
    assert entry is not None
    with pytest.raises(ValueError, match="is not pinned"):
        index.unpin(entry.entry_id)


def test_a_lease_keeps_its_blocks_until_it_is_released_and_is_released_once(make: Make) -> None:
    index = make()
    index.insert(prompt(1, 2), [10, 11])
    lease = index.acquire(prompt(1, 2, 3))
    assert lease.hit.kv_block_ids == (10, 11)
    assert index.evict_lru(5) == ()
    index.release(lease.lease_id)
    with pytest.raises(KeyError, match="is not held"):
        index.release(lease.lease_id)
    assert index.evict_lru(5) == (11, 10)


def test_invalidating_a_block_takes_all_below_it_also_what_is_leased(make: Make) -> None:
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


def test_invalidating_a_pinned_entry_frees_what_it_pinned_above(make: Make) -> None:
    index = make(capacity=3)
    entry = index.insert(prompt(1, 2, 3), [10, 11, 12]).entry
    assert entry is not None
    index.pin(entry.entry_id)
    index.invalidate(entry.token_hash)
    index.check_integrity()
    assert index.evict_lru(9) == (11, 10)


def test_a_hit_on_a_block_that_was_computed_anew_elsewhere_is_cut_off(make: Make) -> None:
    index = make()
    index.insert(prompt(1), [10])
    hit = index.lookup(prompt(1))
    index.evict_lru(1)
    index.insert(prompt(2), [10])
    index.insert(prompt(1), [11])
    assert index.matcher.verify(hit, prompt(1)).is_miss


def test_invalidating_an_entry_that_is_pinned_twice_frees_what_it_pinned_above(make: Make) -> None:
    index = make()
    entry = index.insert(prompt(1, 2), [10, 11]).entry
    assert entry is not None
    index.pin(entry.entry_id)
    index.pin(entry.entry_id)
    index.invalidate(entry.token_hash)
    index.check_integrity()
    assert index.evict_lru(9) == (10,)


def test_inserting_again_counts_nothing_as_inserted(make: Make) -> None:
    index = make()
    for _ in range(3):
        index.insert(prompt(1, 2), [1, 2])
    assert index.report().inserted_blocks == 2


def test_tenants_share_nothing_unless_a_prefix_is_shared_by_name(make: Make) -> None:
    index = make()
    index.insert(prompt(1, 2), [1, 2], salt="a")
    assert index.lookup(prompt(1, 2), salt="b").is_miss
    assert index.keys.share("house rules", prompt(7, 7, tail=2)) == 2
    index.insert(prompt(7, 7, 1), [71, 72, 3], salt="a")
    assert index.lookup(prompt(7, 7, 1), salt="b").kv_block_ids == (71, 72)
    assert index.lookup(prompt(7, 7, 1), salt="a").kv_block_ids == (71, 72, 3)
    index.keys.unshare("house rules")
    assert index.lookup(prompt(7, 7, 1), salt="b").is_miss


def test_a_hit_whose_blocks_are_gone_by_now_is_cut_off_by_verification(make: Make) -> None:
    index = make()
    index.insert(prompt(1, 2, 3), [10, 11, 12])
    hit = index.lookup(prompt(1, 2, 3))
    index.evict_lru(1)
    verified = index.matcher.verify(hit, prompt(1, 2, 3))
    assert (verified.kv_block_ids, verified.matched_length, verified.remaining_tokens) == ((10, 11), 8, 4)
    assert index.report().collisions == 0


def test_the_report_counts_requests_blocks_and_tokens(make: Make) -> None:
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


def test_rates_are_unknown_before_the_first_lookup(make: Make) -> None:
    report = make().report()
    assert (report.request_hit_rate, report.block_hit_rate, report.token_hit_rate) == (None, None, None)
    assert report.lookup_p50_s == 0.0


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_capacity_must_be_positive(capacity: int, make: Make) -> None:
    with pytest.raises(ValueError, match=f"capacity_blocks is {capacity}"):
        make(capacity)


class TestDump:
    """What is dumped comes back, and what is damaged doesn't."""

    def filled(self, make: Make) -> PrefixIndex:
        index = make()
        pinned = index.insert(prompt(1, 2), [10, 11], metadata={"name": "system"}).entry
        assert pinned is not None
        index.pin(pinned.entry_id)
        index.insert(prompt(1, 3), [10, 13])
        index.insert(prompt(5, 6), [20, 21])
        index.lookup(prompt(1, 3))
        return index

    def test_blocks_ages_entries_and_pins_come_back(self, make: Make, kind: Kind) -> None:
        index = self.filled(make)
        again = kind.load(index.dump(), BlockKeys(IDENTITY), capacity_blocks=8)
        again.check_integrity()
        assert again.lookup_all(prompt(1, 2))[0].metadata == {"name": "system"}
        assert again.evict_lru(9) == index.evict_lru(9) == (21, 20, 13)

    def test_a_smaller_index_keeps_the_youngest(self, make: Make, kind: Kind) -> None:
        again = kind.load(self.filled(make).dump(), BlockKeys(IDENTITY), capacity_blocks=3)
        assert again.evict_lru(9) == (13,)

    def test_pinned_blocks_that_dont_fit_are_an_error(self, make: Make, kind: Kind) -> None:
        with pytest.raises(ValueError, match="2 pinned blocks don't fit into capacity_blocks = 1"):
            kind.load(self.filled(make).dump(), BlockKeys(IDENTITY), capacity_blocks=1)

    def test_any_flipped_or_missing_byte_is_noticed(self, make: Make, kind: Kind) -> None:
        data = self.filled(make).dump()
        for place in range(len(data)):
            with pytest.raises(WireError):
                kind.load(
                    data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :], BlockKeys(IDENTITY), capacity_blocks=8
                )
            with pytest.raises(WireError):
                kind.load(data[:place], BlockKeys(IDENTITY), capacity_blocks=8)

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
        self, blocks: list[HeldBlock], order: list[int], entries: list[HeldEntry], kind: Kind
    ) -> None:
        data = encode(Contents(identity=IDENTITY, blocks=blocks, oldest_first=order, entries=entries))
        with pytest.raises(WireError, match="contradicts itself"):
            kind.load(data, BlockKeys(IDENTITY), capacity_blocks=8)

    @pytest.mark.parametrize("capacity", [0, -1])
    def test_a_capacity_must_be_positive(self, capacity: int, make: Make, kind: Kind) -> None:
        with pytest.raises(ValueError, match=f"capacity_blocks is {capacity}"):
            kind.load(self.filled(make).dump(), BlockKeys(IDENTITY), capacity_blocks=capacity)

    def test_another_identity_is_refused(self, make: Make, kind: Kind) -> None:
        other = CacheIdentity(model="m", revision="other", kv_dtype="float32", block_size_tokens=SIZE)
        with pytest.raises(IdentityError, match="other"):
            kind.load(self.filled(make).dump(), BlockKeys(other), capacity_blocks=8)

    def test_both_read_what_the_other_wrote_and_write_the_same(self, make: Make, kind: Kind) -> None:
        data = self.filled(make).dump()
        for reader in (PrefixReuseIndex, NaivePrefixReuseIndex):
            assert reader.load(data, BlockKeys(IDENTITY), capacity_blocks=8).dump() == data
        assert kind.load(data, BlockKeys(IDENTITY), capacity_blocks=8).dump() == data

    def test_a_dump_that_is_no_contents_is_refused(self, kind: Kind) -> None:
        body = b"\xc1"
        data = b"kvgatPI1" + blake2b(body, digest_size=16).digest() + body
        with pytest.raises(WireError, match="can't be read"):
            kind.load(data, BlockKeys(IDENTITY), capacity_blocks=8)

    def test_an_empty_index_comes_back_empty(self, make: Make, kind: Kind) -> None:
        again = kind.load(make().dump(), BlockKeys(IDENTITY), capacity_blocks=1)
        assert len(again) == 0
        assert again.lookup(prompt(1)).is_miss

    def test_leased_blocks_come_back_as_the_youngest_and_unpinned(self, make: Make, kind: Kind) -> None:
        index = make()
        index.insert(prompt(1, 2), [10, 11])
        index.acquire(prompt(1, 2))
        index.insert(prompt(5), [20])
        again = kind.load(index.dump(), BlockKeys(IDENTITY), capacity_blocks=8)
        assert again.evict_lru(9) == (20, 11, 10)


def test_what_is_held_and_counted_is_reported(make: Make) -> None:
    index = make()
    index.insert(prompt(1, 2), [1, 2])
    index.insert(prompt(1), [1])
    index.invalidate(index.keys.of(prompt(1, 2))[1])
    report = index.report()
    assert (report.entries, report.held_blocks, report.invalidated_blocks) == (1, 1, 1)
    assert report.held_bytes >= len(prompt(1))


def test_a_lookup_by_keys_is_the_lookup_of_their_prompt(make: Make) -> None:
    index = make()
    index.insert(prompt(1, 2), [1, 2])
    tokens = prompt(1, 2, 3, tail=2)
    assert index.lookup_keys(index.keys.of(tokens), 14) == index.lookup(tokens)
    assert index.lookup_keys([], 0).is_miss


def test_lineages_are_known_for_held_blocks_only(make: Make) -> None:
    index = make()
    index.insert(prompt(1, 2), [10, 11])
    first, second, third = index.keys.of(prompt(1, 2, 3))
    assert index.lineage_of(first) == (prompt(1), None, 10)
    assert index.lineage_of(second) == (prompt(2), first, 11)
    assert index.lineage_of(third) is None


def test_a_block_may_stand_in_a_prompt_again_and_again(make: Make) -> None:
    index = make()
    index.insert(prompt(7, 7, 7, 7), [1, 2, 3, 4])
    index.insert(prompt(7, 7), [1, 2])
    assert index.lookup(prompt(7, 7, 7, 7, 7)).kv_block_ids == (1, 2, 3, 4)
    assert index.invalidate(index.keys.of(prompt(7, 7))[1])
    assert index.lookup(prompt(7, 7, 7, 7)).kv_block_ids == (1,)


def test_tokens_of_any_bits_are_told_apart_and_no_text_is_needed(make: Make) -> None:
    index = make()
    one, other = b"\xff\xfe\x80\xc0" * SIZE, b"\xff\xfe\x80\xc1" * SIZE
    index.insert(one, [1])
    assert index.lookup(one).kv_block_ids == (1,)
    assert index.lookup(other).is_miss


@pytest.mark.parametrize("call", ["lookup", "lookup_all", "acquire"])
def test_bytes_that_are_no_packed_tokens_are_refused(make: Make, call: str) -> None:
    with pytest.raises(ValueError, match="17 bytes are no packed tokens: each has 4"):
        getattr(make(), call)(b"x" * 17)


def test_an_insertion_of_unpacked_tokens_holds_nothing(make: Make) -> None:
    index = make()
    with pytest.raises(ValueError, match="no packed tokens"):
        index.insert(b"x" * 17, [1])
    assert len(index) == 0


def test_a_capacity_of_one_block_holds_one_block(make: Make) -> None:
    index = make(1)
    refused = index.insert(prompt(1, 2), [1, 2])
    assert refused.entry is not None
    assert (refused.entry.kv_block_ids, refused.redundant_block_ids) == ((1,), (2,))
    assert index.insert(prompt(3), [3]).evicted_block_ids == (1,)


calls_at_once = st.lists(
    st.tuples(prompts, salts, st.sampled_from(["insert", "lookup", "acquire", "evict", "invalidate"])), max_size=40
)


def _what_is_wrong(index: PrefixIndex, tokens: bytes, salt: str, call: str) -> str | None:
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


@settings(
    max_examples=examples(20),
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(calls=calls_at_once)
def test_calls_from_free_running_threads_leave_a_sound_index_that_serves_only_right_blocks(
    make: Make, calls: list[tuple[bytes, str, str]]
) -> None:
    index = make(6)
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
