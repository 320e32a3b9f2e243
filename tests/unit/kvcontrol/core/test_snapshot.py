"""A peer's snapshot is read slice by slice, and one that can't be true is refused by name."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcontrol.core import BlockHash, CacheIdentity, CacheTier, Epoch, InstanceId, Seq, WireError
from kvcontrol.core.control import Residents, Snapshot
from kvcontrol.core.snapshot import SnapshotReader
from kvcontrol.prefix_reuse import FleetIndex
from tests.support.examples import examples

IDENTITY = CacheIdentity(model="m", revision="r", kv_dtype="float32", block_size_tokens=16)
ONE, TWO, THREE, GONE = (BlockHash(bytes([n]) * 16) for n in range(4))
RESIDENTS: Residents = {CacheTier.HBM: [(ONE, None), (TWO, ONE), (THREE, TWO)], CacheTier.NVME: [(TWO, GONE)]}
A = InstanceId("a")


def body(residents: Residents = RESIDENTS, **changes: object) -> bytes:
    snapshot = Snapshot.of(epoch=Epoch("e"), seq=Seq(7), identity=IDENTITY, residents=residents)
    return msgspec.json.encode(msgspec.to_builtins(snapshot) | changes)


def read(data: bytes, max_blocks: int = 2) -> dict[CacheTier, list[tuple[BlockHash, BlockHash | None]]]:
    held: dict[CacheTier, list[tuple[BlockHash, BlockHash | None]]] = {}
    for tier, blocks in SnapshotReader(data).slices(max_blocks):
        assert 0 < len(blocks) <= max_blocks
        held.setdefault(tier, []).extend(blocks)
    return held


def test_what_is_sent_is_what_arrives() -> None:
    reader = SnapshotReader(body())
    assert (reader.epoch, reader.seq, reader.identity) == ("e", 7, IDENTITY)
    assert [(tier, len(blocks)) for tier, blocks in reader.slices(2)] == [("HBM", 2), ("HBM", 1), ("NVME", 1)]
    assert read(body()) == RESIDENTS
    assert read(body({})) == {}
    assert read(body({CacheTier.HBM: []})) == {}


@given(st.lists(st.binary(min_size=8, max_size=32), max_size=30, unique=True), st.integers(1, 7), st.integers(0, 2))
@settings(deadline=None)
def test_any_tree_arrives_whole_however_it_is_cut_and_spaced(names: list[bytes], max_blocks: int, indent: int) -> None:
    blocks = [(BlockHash(name), BlockHash(names[place // 2]) if place else None) for place, name in enumerate(names)]
    residents = {CacheTier.DDR: blocks} if blocks else {}
    assert read(msgspec.json.format(body(residents), indent=indent), max_blocks) == residents


def test_many_windows_make_one_list() -> None:
    names = [BlockHash(place.to_bytes(16, "big")) for place in range(10_000)]
    blocks = list(zip(names, [None, *names], strict=False))
    assert read(body({CacheTier.HBM: blocks}), 999) == {CacheTier.HBM: blocks}


def test_slices_fill_an_index_as_the_whole_does_and_each_only_knows_less() -> None:
    names = [BlockHash(place.to_bytes(16, "big")) for place in range(100)]
    residents = {CacheTier.HBM: list(zip(names, [None, *names], strict=False))}
    index = FleetIndex()
    index.reset(A, {})
    for known, (tier, blocks) in enumerate(SnapshotReader(body(residents)).slices(7), start=1):
        index.extend(A, tier, blocks)
        index.check_integrity()
        assert not index.is_ragged(A)
        assert index.match(names)[A].blocks == min(7 * known, 100)


ONE_HEX, TWO_HEX = ONE.hex(), TWO.hex()


@pytest.mark.parametrize(
    ("blocks", "parents", "reason"),
    [
        (["zz" * 16], [""], "is not hex"),
        ([ONE_HEX[:-1]], [""], "is not hex"),
        ([ONE_HEX[:2] + "  " + ONE_HEX[4:]], [""], "without spaces"),
        ([""], [""], "a block in tiers.HBM has an empty name"),
        (["00"], [""], "a name in tiers.HBM is 1 bytes in 2 hex digits; it is of 8 to 32 bytes"),
        (["00" * 400], [""], "a name in tiers.HBM is 400 bytes"),
        (["00" * 65_536], [""], "longer than 1024 bytes"),
        ([ONE_HEX], ["00"], "a name in parents.HBM is 1 bytes"),
        ([ONE_HEX], [], "not equally long"),
        ([ONE_HEX], ["", ""], "not equally long"),
        ([ONE_HEX, ONE_HEX], ["", ""], "comes twice"),
        ([ONE_HEX], [ONE_HEX], "parents come first"),
        ([ONE_HEX, TWO_HEX], [TWO_HEX, ONE_HEX], "parents come first"),
        ([ONE_HEX, TWO_HEX], [TWO_HEX, ""], "parents come first"),
        ([7], [""], "is not a list of hex names"),
        ([[ONE_HEX, TWO_HEX]], [""], "is not a list of hex names"),
        (["a,b"], [""], "is not hex"),
        ({}, [], "tiers.HBM is no list"),
    ],
)
@pytest.mark.parametrize("max_blocks", [1, 100])
def test_lists_that_can_not_be_are_refused_by_name(
    blocks: Any, parents: Sequence[str], reason: str, max_blocks: int
) -> None:
    with pytest.raises(WireError, match=reason):
        read(body(tiers={"HBM": blocks}, parents={"HBM": parents}), max_blocks)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seq": -5}, "Expected `int` >= -1 - at `$.seq`"),
        ({"seq": 2**62}, "Expected `int` <= 9007199254740991 - at `$.seq`"),
        ({"seq": True}, "Expected `int`, got `bool`"),
        ({"epoch": ""}, "Expected `str` of length >= 1"),
        ({"epoch": "e" * 1000}, "Expected `str` of length <= 256"),
        ({"identity": {"model": "m", "revision": "r", "kv_dtype": "f", "block_size_tokens": -1}}, "must be > 0"),
        ({"tiers": {"TAPE": []}, "parents": {"TAPE": []}}, "tiers are HBM, DDR, NVME, REMOTE"),
        ({"parents": {}}, "not of the same tiers"),
        ({"parents": None}, "Expected `object`"),
    ],
)
def test_a_head_that_can_not_be_is_refused_by_name(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(WireError) as error:
        SnapshotReader(body(**changes))
    assert reason in str(error.value)


def test_one_that_is_too_long_is_not_even_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcontrol.core.snapshot.MAX_SNAPSHOT_BYTES", 10)
    with pytest.raises(WireError, match="bytes long; at most 10 are allowed"):
        SnapshotReader(body())


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=60), st.data())
def test_any_bytes_are_read_or_raise_the_one_error(junk: bytes, data: st.DataObject) -> None:
    whole = body()
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(start + 60, len(whole))))
    for damaged in (junk, whole[:start] + junk + whole[end:]):
        try:
            held = read(damaged)
        except WireError:
            continue
        assert all(8 <= len(block) <= 32 for blocks in held.values() for block, _ in blocks)
