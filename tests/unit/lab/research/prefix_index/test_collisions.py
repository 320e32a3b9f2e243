"""A hash that collides is found out on every path, is counted, is in the report, and serves nobody another's blocks."""

from collections.abc import Callable

import pytest

from kvcontrol.core import BlockHash
from lab.research.prefix_index.index import PrefixReuseIndex
from lab.research.prefix_index.keys import BlockKeys, ChainHasher
from lab.research.prefix_index.naive_index import NaivePrefixReuseIndex
from lab.research.prefix_index.protocol import PrefixIndex
from tests.support.prefixes import IDENTITY, depth_chain, prompt

Kind = type[PrefixReuseIndex] | type[NaivePrefixReuseIndex]
Make = Callable[[], PrefixIndex]

MINE, YOURS = prompt(1, 2), prompt(5, 6)
"""Every block of one has the key of the other's."""


@pytest.fixture(params=[PrefixReuseIndex, NaivePrefixReuseIndex])
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


def holding_mine(kind: Kind, hasher: ChainHasher = depth_chain) -> PrefixIndex:
    index = kind(BlockKeys(IDENTITY, hasher=hasher), capacity_blocks=8)
    index.insert(MINE, [10, 11])
    assert index.keys.of(MINE) == index.keys.of(YOURS)
    return index


def test_a_lookup_by_hash_is_not_certain_and_verifying_it_finds_the_collision(kind: Kind) -> None:
    index = holding_mine(kind)
    hit = index.lookup(YOURS)
    assert hit.confidence < 1.0
    assert index.matcher.verify(hit, YOURS).is_miss
    assert index.report().collisions == 1
    assert index.matcher.verify(index.lookup(MINE), MINE).kv_block_ids == (10, 11)
    assert index.report().collisions == 1


def test_a_lookup_by_keys_is_verified_the_same_way(kind: Kind) -> None:
    index = holding_mine(kind)
    hit = index.lookup_keys(index.keys.of(YOURS), 8)
    assert hit.confidence < 1.0
    verified = index.matcher.verify(hit, YOURS)
    assert (verified.kv_block_ids, verified.confidence, verified.remaining_tokens) == ((), 1.0, 8)
    assert index.report().collisions == 1


def test_a_collision_behind_an_equal_beginning_cuts_the_hit_there(kind: Kind) -> None:
    index = holding_mine(kind)
    tokens = prompt(1, 6)
    assert index.matcher.verify(index.lookup(tokens), tokens).kv_block_ids == (10,)
    assert index.acquire(tokens).hit.kv_block_ids == (10,)
    assert index.report().collisions == 2


def test_entries_of_a_colliding_prompt_are_not_found(kind: Kind) -> None:
    index = holding_mine(kind)
    assert index.lookup_all(YOURS) == ()
    assert index.report().collisions == 1


def test_acquiring_pins_nothing_of_the_other_prompt(kind: Kind) -> None:
    index = holding_mine(kind)
    lease = index.acquire(YOURS)
    assert lease.hit.is_miss
    assert index.report().collisions == 1
    assert index.evict_lru(9) == (11, 10)
    index.release(lease.lease_id)


def test_inserting_changes_nothing_of_the_other_prompt(kind: Kind) -> None:
    index = holding_mine(kind)
    refused = index.insert(YOURS, [20, 21])
    assert (refused.entry, refused.redundant_block_ids, refused.evicted_block_ids) == (None, (20, 21), ())
    assert index.report().collisions == 1
    assert index.acquire(MINE).hit.kv_block_ids == (10, 11)


def test_inserting_behind_an_equal_beginning_holds_up_to_the_collision(kind: Kind) -> None:
    index = holding_mine(kind)
    made = index.insert(prompt(1, 6, 7), [20, 21, 22])
    assert made.entry is not None
    assert (made.entry.kv_block_ids, made.redundant_block_ids) == ((10,), (20, 21, 22))
    assert index.report().collisions == 1
    index.check_integrity()


def test_a_key_behind_another_parent_is_a_collision_although_its_tokens_are_equal(kind: Kind) -> None:
    """The last block has one key and the same tokens in both prompts; what comes before it differs."""

    def by_last_token(parent: BlockHash, tokens: bytes, size: int) -> list[BlockHash]:
        del parent
        width = size * 4
        return [BlockHash(tokens[start : start + 4]) for start in range(0, len(tokens) - width + 1, width)]

    index = kind(BlockKeys(IDENTITY, hasher=by_last_token), capacity_blocks=8)
    index.insert(prompt(1, 2), [10, 11])
    refused = index.insert(prompt(5, 2), [20, 21])
    assert refused.redundant_block_ids == (21,)
    assert index.report().collisions == 1
    assert index.acquire(prompt(5, 2)).hit.kv_block_ids == (20,)
    hit = index.lookup_keys(index.keys.of(prompt(1, 2)), 8)
    assert index.matcher.verify(hit, prompt(5, 2)).is_miss
    index.check_integrity()


def test_a_loaded_index_finds_the_collisions_that_the_dumped_one_would(kind: Kind) -> None:
    index = holding_mine(kind)
    again = kind.load(index.dump(), index.keys, capacity_blocks=8)
    assert again.acquire(YOURS).hit.is_miss
    assert again.lookup_all(YOURS) == ()
    assert again.matcher.verify(again.lookup(YOURS), YOURS).is_miss
    assert again.insert(YOURS, [20, 21]).entry is None
    assert again.report().collisions == 4
    assert again.acquire(MINE).hit.kv_block_ids == (10, 11)


def test_a_dump_loaded_under_another_hash_serves_nothing_wrong(kind: Kind) -> None:
    data = holding_mine(kind).dump()
    again = kind.load(data, BlockKeys(IDENTITY), capacity_blocks=8)
    assert again.acquire(MINE).hit.is_miss
    assert again.acquire(YOURS).hit.is_miss


def test_invalidating_a_shared_key_forgets_who_is_held_and_serves_the_other_only_its_own(kind: Kind) -> None:
    index = holding_mine(kind)
    stale = index.lookup(YOURS)
    assert sorted(index.invalidate(index.keys.of(YOURS)[0])) == [10, 11]
    assert index.matcher.verify(stale, YOURS).is_miss
    index.insert(YOURS, [20, 21])
    assert index.acquire(YOURS).hit.kv_block_ids == (20, 21)
    assert index.acquire(MINE).hit.is_miss
    assert index.matcher.verify(stale, YOURS).is_miss  # its block ids are those that are gone
    assert index.report().collisions == 1


def test_a_key_that_was_evicted_and_taken_by_the_other_prompt_serves_the_other_only(kind: Kind) -> None:
    index = holding_mine(kind)
    stale = index.lookup(MINE)
    assert index.evict_lru(2) == (11, 10)
    index.insert(YOURS, [10, 11])  # even under the same block ids
    assert index.matcher.verify(stale, MINE).is_miss
    assert index.acquire(MINE).hit.is_miss
    assert index.acquire(YOURS).hit.kv_block_ids == (10, 11)
    assert index.report().collisions == 2
