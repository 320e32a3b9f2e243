"""What the fast index does beyond the contract: readers never wait, and much is held quickly."""

import threading

import pytest

from kvcontrol.core import CacheIdentity, token_bytes
from lab.research.prefix_index.entry import PrefixHit
from lab.research.prefix_index.index import PrefixReuseIndex
from lab.research.prefix_index.keys import BlockKeys
from tests.support.prefixes import IDENTITY, SIZE, prompt


def make(capacity: int = 8) -> PrefixReuseIndex:
    return PrefixReuseIndex(BlockKeys(IDENTITY), capacity_blocks=capacity)


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


def test_a_note_of_a_block_that_was_computed_anew_meanwhile_is_no_note_of_the_new_one() -> None:
    """A reader that stood still between finding a block and noting its use, while two writers came and went."""
    index = make()
    index.insert(prompt(1), [10])
    (key,) = index.keys.of(prompt(1))
    found = index._tree.get(key)
    assert found is not None
    index.invalidate(key)
    index.insert(prompt(1), [11])
    index.insert(prompt(2), [20])
    index._ages.notes.append(found)
    assert index.evict_lru(1) == (11,)
    index.check_integrity()


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


def test_a_prompt_of_a_million_tokens_is_held_and_found() -> None:
    identity = CacheIdentity(model="m", revision="r", kv_dtype="float32", block_size_tokens=16)
    index = PrefixReuseIndex(BlockKeys(identity), capacity_blocks=100_000)
    tokens = token_bytes(range(1_000_000))
    index.insert(tokens, range(62_500))
    assert index.matcher.verify(index.lookup(tokens), tokens).matched_length == 1_000_000
    assert index.lookup(tokens[4:]).is_miss
    assert index.evict_lru(62_500) == tuple(range(62_499, -1, -1))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_million_blocks_pass_through_an_index_that_holds_four_million() -> None:
    """About 2 GB; held all at once they would need 4.5 GB."""
    identity = CacheIdentity(model="m", revision="r", kv_dtype="float32", block_size_tokens=1)
    index = PrefixReuseIndex(BlockKeys(identity), capacity_blocks=4_000_000)
    for start in range(0, 10_000_000, 1_000):
        index.insert(token_bytes(range(start, start + 1_000)), range(start, start + 1_000))
    assert len(index) == 4_000_000
    assert index.lookup(token_bytes(range(9_999_000, 10_000_000))).matched_length == 1_000
    assert index.lookup(token_bytes(range(6_000_000, 6_001_000))).matched_length == 1_000
    assert index.lookup(token_bytes(range(5_999_000, 6_000_000))).is_miss
    assert index.report().evicted_blocks == 6_000_000
    index.check_integrity()
    assert index.evict_lru(10_000_000)[:3] == (6_001_999, 6_001_998, 6_001_997)
    assert len(index) == 0
