"""Work in proportion to what is held, memory in proportion to what is allowed, and both are seen."""

import gc
import tracemalloc
from collections.abc import Callable, Sequence

import msgspec
import pytest

from kvcontrol.core import BlockHash, WireError
from lab.research.prefix_index.dump import PIECE_ITEMS, Contents, HeldBlock, HeldEntry, decode, encode, let_go, pieces
from lab.research.prefix_index.entry import PrefixHit
from lab.research.prefix_index.index import PrefixReuseIndex
from lab.research.prefix_index.inputs import MAX_METADATA_BYTES, MAX_METADATA_ITEMS
from lab.research.prefix_index.keys import BlockKeys
from lab.research.prefix_index.naive_index import NaivePrefixReuseIndex
from lab.research.prefix_index.protocol import PrefixIndex
from tests.support.prefixes import IDENTITY, prompt
from tests.support.work import steps

Kind = type[PrefixReuseIndex] | type[NaivePrefixReuseIndex]
both = pytest.mark.parametrize("kind", [PrefixReuseIndex, NaivePrefixReuseIndex])
MANY = 600


def made(kind: Kind = PrefixReuseIndex, capacity: int = 20_000) -> PrefixIndex:
    return kind(BlockKeys(IDENTITY), capacity_blocks=capacity)


def wide(blocks: int) -> PrefixIndex:
    """One block with many children."""
    index = made()
    for place in range(blocks):
        index.insert(prompt(1, 10 + place), [0, 1 + place])
    return index


def deep(blocks: int, *, pins: int = 0) -> PrefixIndex:
    """One prompt, held block by block: an entry ends at each."""
    index = made()
    tokens = prompt(*range(blocks))
    for place in range(blocks):
        entry = index.insert(tokens[: 16 * (place + 1)], range(place + 1)).entry
        assert entry is not None
        for _ in range(pins):
            index.pin(entry.entry_id)
    return index


@pytest.mark.parametrize("build", [wide, deep, lambda blocks: deep(blocks, pins=2)], ids=["wide", "deep", "pinned"])
def test_loading_is_work_in_proportion_to_what_is_held(build: Callable[[int], PrefixIndex]) -> None:
    work = []
    for blocks in (MANY // 5, MANY):
        data = build(blocks).dump()
        work.append(
            steps(lambda data=data: PrefixReuseIndex.load(data, BlockKeys(IDENTITY), capacity_blocks=20_000))  # type: ignore[misc]
        )
    assert work[1] < 7 * work[0]


def test_pins_of_many_entries_on_one_path_come_back() -> None:
    index = deep(50, pins=2)
    again = PrefixReuseIndex.load(index.dump(), BlockKeys(IDENTITY), capacity_blocks=50)
    again.check_integrity()
    assert again.dump() == index.dump()
    assert again.evict_lru(50) == ()
    with pytest.raises(ValueError, match="50 pinned blocks don't fit"):
        PrefixReuseIndex.load(index.dump(), BlockKeys(IDENTITY), capacity_blocks=49)


def held_by(build: Callable[[], PrefixIndex]) -> tuple[PrefixIndex, int]:
    gc.collect()
    tracemalloc.start()
    try:
        index = build()
        gc.collect()
        return index, tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_memory_is_in_proportion_to_blocks_however_they_were_inserted() -> None:
    _, some = held_by(lambda: deep(MANY // 5))
    _, more = held_by(lambda: deep(MANY))
    assert more < 7 * some


def test_leases_of_one_long_prompt_cost_no_copy_of_it_each() -> None:
    def leased(leases: int) -> PrefixIndex:
        index = deep(MANY)
        for _ in range(leases):
            index.acquire(prompt(*range(MANY)))
        return index

    _, before = held_by(lambda: leased(0))
    _, after = held_by(lambda: leased(100))
    assert after - before < 100 * 1_000


@pytest.mark.parametrize(
    "build",
    [
        lambda: deep(MANY),
        lambda: wide(MANY),
        lambda: annotated(MANY, "x" * 900),
        lambda: annotated(MANY, "é" * 450),
        lambda: annotated(MANY, "x" * 896 + "👩"),
    ],
    ids=["deep", "wide", "with metadata", "with accents", "with four bytes a character"],
)
def test_the_bytes_reported_are_those_that_are_held(build: Callable[[], PrefixIndex]) -> None:
    index, really = held_by(build)
    reported = index.report().held_bytes
    assert 0.7 * really < reported < 1.5 * really


def annotated(entries: int, text: str) -> PrefixIndex:
    index = made()
    for place in range(entries):
        index.insert(prompt(10 + place), [place], metadata={"name": f"{place}{text}"})
    return index


@both
def test_metadata_that_leaves_is_no_longer_counted(kind: Kind) -> None:
    index = made(kind, 4)
    before = index.report().held_bytes
    for place in range(20):
        index.insert(prompt(1, place), [0, place], metadata={"name": "x" * 800})
    assert index.report().held_bytes < before + 4 * 3_000
    index.evict_lru(2)
    index.invalidate(index.keys.of(prompt(1))[0])
    assert index.report().held_bytes == before
    index.check_integrity()


@both
def test_metadata_is_a_copy_that_nobody_changes(kind: Kind) -> None:
    index = made(kind)
    mine = {"name": "system"}
    entry = index.insert(prompt(1), [1], metadata=mine).entry
    mine["name"] = "other"
    assert entry is not None
    assert entry.metadata == index.lookup_all(prompt(1))[0].metadata == {"name": "system"}
    with pytest.raises(TypeError):
        entry.metadata["name"] = "x" * 10**6  # type: ignore[index]


WRONG_METADATA = {
    "a number": (5, "metadata is 5; it must map text to text"),
    "a list": ([("a", "b")], "it must map text to text"),
    "a value that is no text": ({"a": 1}, "metadata has 1; it must map text to text"),
    "a key that is no text": ({b"a": "1"}, "metadata has b'a'; it must map text to text"),
    "half a pair": ({"a": "\ud800"}, "which is no Unicode text: surrogates not allowed"),
    "half a pair in a key": ({"\udfff": "a"}, "which is no Unicode text"),
    "too many": ({str(n): "" for n in range(17)}, f"has 17 items; at most {MAX_METADATA_ITEMS} are allowed"),
    "too much": ({"a": "x" * MAX_METADATA_BYTES}, f"has 1025 bytes; at most {MAX_METADATA_BYTES} are allowed"),
    "too much in UTF-8": ({"a": "é" * 600}, "has 1201 bytes"),
}
WRONG_IDS: dict[str, tuple[Sequence[object], str]] = {
    "text": (["x", "y"], "must be integers of 64 bits"),
    "fractions": ([1.5, 2.0], "must be integers of 64 bits"),
    "none": ([None, 1], "must be integers of 64 bits"),
    "too large": ([1, 2**63], "must be integers of 64 bits"),
    "too small": ([1, -(2**63) - 1], "must be integers of 64 bits"),
    "too few": ([1], "1 kv_block_ids for 2 full blocks"),
}


@both
@pytest.mark.parametrize(("metadata", "reason"), WRONG_METADATA.values(), ids=WRONG_METADATA)
def test_wrong_metadata_is_refused_before_anything_is_changed(kind: Kind, metadata: object, reason: str) -> None:
    index = made(kind, 2)
    index.insert(prompt(8, 9), [80, 90])
    before = index.dump()
    with pytest.raises(ValueError, match=reason):
        index.insert(prompt(1, 2), [1, 2], metadata=metadata)  # type: ignore[arg-type]
    assert index.dump() == before


@both
@pytest.mark.parametrize(("ids", "reason"), WRONG_IDS.values(), ids=WRONG_IDS)
def test_wrong_block_ids_are_refused_before_anything_is_changed(kind: Kind, ids: Sequence[int], reason: str) -> None:
    index = made(kind, 2)
    index.insert(prompt(8, 9), [80, 90])
    before = index.dump()
    with pytest.raises(ValueError, match=reason):
        index.insert(prompt(1, 2), ids)
    assert index.dump() == before


@both
@pytest.mark.parametrize("ids", [(-(2**63), 2**63 - 1), (True, 7)])
def test_every_id_of_64_bits_survives_a_dump_as_a_plain_integer(kind: Kind, ids: tuple[int, ...]) -> None:
    index = made(kind)
    index.insert(prompt(1, 2), ids)
    again = kind.load(index.dump(), BlockKeys(IDENTITY), capacity_blocks=2)
    assert again.lookup(prompt(1, 2)).kv_block_ids == tuple(int(each) for each in ids)


@both
@pytest.mark.parametrize("capacity", [0, -1, 1.5, float("nan"), float("inf"), "8", None, True])
def test_a_capacity_is_a_whole_number_of_blocks(kind: Kind, capacity: int) -> None:
    with pytest.raises(ValueError, match="must be a whole number > 0"):
        made(kind, capacity)
    with pytest.raises(ValueError, match="must be a whole number > 0"):
        kind.load(made(kind).dump(), BlockKeys(IDENTITY), capacity_blocks=capacity)


@both
@pytest.mark.parametrize("blocks", [1.5, float("nan"), float("inf"), "3"])
def test_only_whole_numbers_of_blocks_are_evicted(kind: Kind, blocks: int) -> None:
    index = made(kind)
    index.insert(prompt(1, 2), [1, 2])
    with pytest.raises(TypeError):
        index.evict_lru(blocks)
    assert len(index) == 2


@both
def test_a_prompt_is_no_shorter_than_its_own_blocks(kind: Kind) -> None:
    index = made(kind)
    keys = index.keys.of(prompt(1, 2))
    for tokens in (7, 0, -1, float("nan")):
        with pytest.raises(ValueError, match="for 2 full blocks of 4 tokens"):
            index.lookup_keys(keys, tokens)  # type: ignore[arg-type]
    assert index.report().lookups == 0
    assert index.lookup_keys(keys, 8).remaining_tokens == 8


@both
def test_a_hit_is_verified_against_its_own_prompt_only(kind: Kind) -> None:
    index = made(kind)
    index.insert(prompt(1, 2), [1, 2])
    hit = index.lookup(prompt(1, 2, 3))
    for short in (b"", prompt(1), prompt(1, tail=3)):
        with pytest.raises(ValueError, match="it is not the one that was looked up"):
            index.matcher.verify(hit, short)
    assert index.report().collisions == 0


@both
def test_what_a_verified_hit_says_comes_from_the_index_and_not_from_the_hit(kind: Kind) -> None:
    index = made(kind)
    index.insert(prompt(1, 2), [1, 2])
    keys = tuple(index.keys.of(prompt(1, 2)))
    forged = PrefixHit(
        matched_length=10**9, confidence=1.0, remaining_tokens=-5, kv_block_ids=(1, 2), block_hashes=keys
    )
    verified = index.matcher.verify(forged, prompt(1, 2, 3))
    assert (verified.matched_length, verified.remaining_tokens) == (8, 4)
    unequal = PrefixHit(matched_length=8, confidence=0.5, remaining_tokens=0, kv_block_ids=(1,), block_hashes=keys)
    with pytest.raises(ValueError, match="2 hashes for 1 block ids"):
        index.matcher.verify(unequal, prompt(1, 2))


def test_entries_of_one_prompt_share_its_ids_and_equal_tuples_of_them() -> None:
    index = deep(6)
    found = index.lookup_all(prompt(*range(6)))
    assert [entry.kv_block_ids for entry in found] == [tuple(range(length)) for length in range(1, 7)]
    ids = found[3].kv_block_ids
    assert (ids[0], ids[-1], ids[1:3], ids[::-1], repr(ids)) == (0, 3, (1, 2), (3, 2, 1, 0), "(0, 1, 2, 3)")
    assert (hash(ids), ids != (0, 1), ids != [0, 1, 2, 3]) == (hash((0, 1, 2, 3)), True, True)
    for outside in (4, -5):
        with pytest.raises(IndexError):
            ids[outside]


def test_listing_the_entries_of_a_prompt_is_memory_in_proportion_to_it() -> None:
    peaks = []
    for blocks in (MANY // 5, MANY):
        index = deep(blocks)
        tokens = prompt(*range(blocks))
        tracemalloc.start()
        index.lookup_all(tokens)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 7 * peaks[0]


@pytest.mark.parametrize("count", [0, 1, 15, 16, PIECE_ITEMS, PIECE_ITEMS + 15, 2 * PIECE_ITEMS + 1, 70_000])
def test_a_dump_in_pieces_is_the_dump_at_once(count: int) -> None:
    contents = Contents(
        identity=IDENTITY,
        blocks=[HeldBlock(BlockHash(place.to_bytes(8, "big")), place - 1, b"x" * 16, place) for place in range(count)],
        oldest_first=[*range(count)][::-1],
        entries=[HeldEntry(place, {"name": str(place)}, 1) for place in range(0, count, 3)],
    )
    parts = [*pieces(contents)]
    assert b"".join(parts) == msgspec.msgpack.encode(contents)
    assert max(map(len, parts)) < 100 * PIECE_ITEMS
    assert decode(encode(contents), IDENTITY) == contents
    let_go(contents)
    assert (contents.blocks, contents.oldest_first, contents.entries) == ([], [], [])


@both
@pytest.mark.parametrize(
    ("block_id", "entries"),
    [
        (2**63, []),
        (1, [HeldEntry(0, {}, 0), HeldEntry(0, {}, 1)]),
        (1, [HeldEntry(0, {"name": "x" * 2_000}, 0)]),
        (1, [HeldEntry(0, {str(n): "" for n in range(20)}, 0)]),
    ],
    ids=["an id beyond 64 bits", "an entry twice", "too much metadata", "too many items"],
)
def test_a_dump_with_what_no_index_accepts_is_refused(kind: Kind, block_id: int, entries: list[HeldEntry]) -> None:
    contents = Contents(
        identity=IDENTITY, blocks=[HeldBlock(b"a", -1, b"x" * 16, block_id)], oldest_first=[0], entries=entries
    )
    with pytest.raises(WireError, match="contradicts itself"):
        kind.load(encode(contents), BlockKeys(IDENTITY), capacity_blocks=8)
