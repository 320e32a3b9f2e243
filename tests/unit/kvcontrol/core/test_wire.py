"""KV events survive the wire in our form, in vLLM's older forms are understood, and what is broken is said."""

import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcontrol.core import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    CacheTier,
    EventBatch,
    KvEvent,
    Seq,
    WireError,
)
from kvcontrol.core.events import sliced
from kvcontrol.core.wire import (
    END_OF_REPLAY,
    MAX_BATCH_BLOCKS,
    MAX_EVENT_TOKENS,
    MAX_PAYLOAD_BYTES,
    MAX_SEQ,
    MAX_UNDECODABLE,
    decode_batch,
    decode_seq,
    encode_batch,
    encode_seq,
)
from tests.support.examples import examples
from tests.support.work import steps

hashes = st.binary(min_size=8, max_size=32).map(BlockHash)
tiers = st.sampled_from(list(CacheTier))


@st.composite
def stored_events(draw: st.DrawFn) -> BlockStored:
    chain = draw(st.lists(hashes, min_size=2, max_size=5, unique=True))
    parent, blocks = draw(st.sampled_from([None, chain[0]])), tuple(chain[1:])
    size = draw(st.integers(1, 4))
    ids = st.lists(st.integers(0, 2**32 - 1), min_size=size * len(blocks), max_size=size * len(blocks))
    return BlockStored(
        block_hashes=blocks,
        parent=parent,
        token_ids=draw(st.just(()) | ids.map(tuple)),
        block_size_tokens=size,
        tier=draw(tiers),
        adapter=draw(st.sampled_from(["", "lora-1"])),
    )


removed_events = st.builds(BlockRemoved, block_hashes=st.lists(hashes, min_size=1, max_size=4).map(tuple), tier=tiers)
events = st.one_of(stored_events(), removed_events, st.just(AllBlocksCleared()))


@given(st.lists(events, max_size=5).map(tuple), st.floats(0, 2**40), st.none() | st.integers(0, 7))
def test_what_is_encoded_is_decoded(items: tuple[KvEvent, ...], ts: float, rank: int | None) -> None:
    batch = EventBatch(published_at_s=ts, events=items, data_parallel_rank=rank)
    decoded = decode_batch(encode_batch(batch))
    assert (decoded.batch, decoded.undecodable) == (batch, ())


def test_our_form_is_the_map_that_vllm_publishes() -> None:
    event = BlockStored(
        block_hashes=(BlockHash(b"a" * 16),), parent=None, token_ids=(1, 2), block_size_tokens=2, tier=CacheTier.DDR
    )
    raw = msgspec.msgpack.decode(encode_batch(EventBatch(published_at_s=1.5, events=(event,))))
    assert raw == [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [b"a" * 16],
                "parent_block_hash": None,
                "token_ids": [1, 2],
                "block_size": 2,
                "lora_id": None,
                "medium": "CPU",
                "lora_name": None,
            }
        ],
        None,
    ]


@pytest.mark.parametrize(
    "payload",
    [
        [1.0, [["BlockStored", [7, 8], None, [1, 2], 1, None, "GPU"], ["BlockRemoved", [7]], ["AllBlocksCleared"]]],
        {
            "ts": 1,
            "events": [
                {"type": "BlockStored", "block_hashes": [7, 8], "token_ids": [1, 2], "block_size": 1, "new": True},
                {"type": "BlockRemoved", "block_hashes": [7], "medium": None},
                {"type": "AllBlocksCleared"},
            ],
            "data_parallel_rank": None,
        },
    ],
    ids=["events as arrays", "batch as a map"],
)
def test_the_shapes_of_other_engines_are_understood(payload: object) -> None:
    seven, eight = (BlockHash(n.to_bytes(8, "big")) for n in (7, 8))
    decoded = decode_batch(msgspec.msgpack.encode(payload))
    assert decoded.undecodable == ()
    assert decoded.batch.events == (
        BlockStored(block_hashes=(seven, eight), parent=None, token_ids=(1, 2), block_size_tokens=1),
        BlockRemoved(block_hashes=(seven,)),
        AllBlocksCleared(),
    )


def test_a_signed_and_an_unsigned_64_bit_hash_are_the_same_key() -> None:
    payload = [0.0, [["BlockRemoved", [-1]], ["BlockRemoved", [2**64 - 1]]]]
    one, other = decode_batch(msgspec.msgpack.encode(payload)).batch.events
    assert one == other


H = b"h" * 16
STORED = {"type": "BlockStored", "block_hashes": [H], "block_size": 1}
REMOVED = {"type": "BlockRemoved", "block_hashes": [H]}


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (
            REMOVED | {"type": "BlockMoved"},
            "no BlockStored, BlockRemoved or AllBlocksCleared: Invalid value 'BlockMoved'",
        ),
        ({"block_hashes": [H]}, "missing required field `type`"),
        (STORED | {"block_hashes": []}, "Expected `array` of length >= 1 - at `$.block_hashes`"),
        (STORED | {"block_hashes": [b""]}, "Expected `bytes` of length >= 8 - at `$.block_hashes[0]`"),
        (STORED | {"block_hashes": [b"x"]}, "Expected `bytes` of length >= 8 - at `$.block_hashes[0]`"),
        (REMOVED | {"block_hashes": [H, b"x" * 65_536]}, "Expected `bytes` of length <= 32 - at `$.block_hashes[1]`"),
        (REMOVED | {"block_hashes": ["x"]}, "Expected `int | bytes`, got `str` - at `$.block_hashes[0]`"),
        (REMOVED | {"block_hashes": [True]}, "Expected `int | bytes`, got `bool`"),
        (REMOVED | {"block_hashes": None}, "Expected `array`, got `None` - at `$.block_hashes`"),
        (STORED | {"parent_block_hash": b"x"}, "Expected `bytes` of length >= 8 - at `$.parent_block_hash`"),
        (STORED | {"block_size": 0}, "Expected `int` >= 1 - at `$.block_size`"),
        (STORED | {"block_size": -16}, "Expected `int` >= 1 - at `$.block_size`"),
        (STORED | {"block_size": 2**40}, "Expected `int` <= 65536 - at `$.block_size`"),
        ({"type": "BlockStored", "block_hashes": [H]}, "block_size is missing; it is from 1 to 65536"),
        (STORED | {"block_size": 2, "token_ids": [1]}, "1 tokens for 1 blocks of 2"),
        (STORED | {"token_ids": ["x"]}, "BlockStored.token_ids: Expected `int`, got `str` - at `$[0]`"),
        (STORED | {"token_ids": [-1]}, "BlockStored.token_ids: Expected `int` >= 0 - at `$[0]`"),
        (STORED | {"token_ids": "x"}, "BlockStored.token_ids is no list"),
        (STORED | {"token_ids": 7}, "BlockStored.token_ids is no list"),
        (STORED | {"token_ids": {}}, "BlockStored.token_ids is no list"),
        (STORED | {"token_ids": [1] * 20}, "20 tokens for 1 blocks of 1"),
        (STORED | {"token_ids": [1] * 70_000}, "70000 tokens for 1 blocks of 1"),
        (STORED | {"parent_block_hash": H}, "a chain has no cycle"),
        (STORED | {"block_hashes": [H, b"i" * 16, H]}, "a chain has no cycle"),
        (REMOVED | {"medium": "TAPE"}, "medium is 'TAPE'; known are CPU, CPU_PINNED, DISK, EXTERNAL, GPU, REMOTE"),
        (REMOVED | {"medium": "GPU" * 1000}, "Expected `str` of length <= 256 - at `$.medium`"),
        (["BlockStored", [b"x"], None, [], 1], "Expected `bytes` of length >= 8 - at `$[1][0]`"),
        (["BlockMoved", [H]], "Invalid value 'BlockMoved' - at `$[0]`"),
        ([], "Expected `array` of at least length 1, got 0"),
        (7, "neither a map with a type nor an array"),
    ],
)
def test_a_broken_event_is_named_and_its_neighbours_are_kept(event: object, reason: str) -> None:
    decoded = decode_batch(msgspec.msgpack.encode([0.0, [event, ["AllBlocksCleared"]]]))
    assert decoded.batch.events == (AllBlocksCleared(),)
    assert len(decoded.undecodable) == 1
    assert reason in decoded.undecodable[0]


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "payload is neither"),
        (b"\xc1", "payload is neither"),
        (msgspec.msgpack.encode(7), "payload is neither"),
        (msgspec.msgpack.encode(["x", []]), "Expected `float`, got `str`"),
        (msgspec.msgpack.encode([float("nan"), []]), "batch.ts is nan"),
        (msgspec.msgpack.encode([1.0, [], -1]), "Expected `int` >= 0"),
        (msgspec.msgpack.encode({"events": []}), "missing required field `ts`"),
        (msgspec.msgpack.encode([1.0, [[]] * 65_537]), "Expected `array` of length <= 65536"),
        (bytes(MAX_PAYLOAD_BYTES + 1), "bytes long; at most"),
        (msgspec.msgpack.encode([1.0, []]) + b"more", "trailing characters"),
    ],
)
def test_a_payload_that_is_no_batch_is_refused_by_name(payload: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decode_batch(payload)


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 65_535, 65_536])
@pytest.mark.parametrize("with_tokens", [True, False])
def test_tokens_are_counted_in_every_length_and_read_where_they_are_wanted(tokens: int, with_tokens: bool) -> None:  # noqa: FBT001 - parameters
    blocks = [place.to_bytes(8, "big") for place in range(max(tokens, 1))]
    event = STORED | {"block_hashes": blocks, "token_ids": [7] * tokens}
    decoded = decode_batch(msgspec.msgpack.encode([0.0, [event]]), with_tokens=with_tokens)
    (stored,) = decoded.batch.events
    assert isinstance(stored, BlockStored)
    assert stored.token_ids == ((7,) * tokens if with_tokens else ())
    wrong = decode_batch(
        msgspec.msgpack.encode([0.0, [event | {"token_ids": [7] * (tokens + 2)}]]), with_tokens=with_tokens
    )
    assert f"{tokens + 2} tokens for" in wrong.undecodable[0]


def test_a_token_list_of_the_wrong_length_is_refused_before_it_is_read() -> None:
    """Millions of one-byte tokens, the last of which is none: nobody looks."""
    event = msgspec.msgpack.encode(STORED | {"token_ids": [1] * 4_000_000})
    payload = b"\x92\x00\x91" + event
    tracemalloc.start()
    try:
        decoded = decode_batch(payload)
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert decoded.undecodable == ("BlockStored has 4000000 tokens for 1 blocks of 1",)
    assert peak_bytes < 1_000_000


def test_more_tokens_than_any_engine_stores_at_once_are_refused() -> None:
    blocks = [place.to_bytes(8, "big") for place in range(64)]
    event = {"type": "BlockStored", "block_hashes": blocks, "block_size": 32_769, "token_ids": [1] * (64 * 32_769)}
    (reason,) = decode_batch(msgspec.msgpack.encode([0.0, [event]])).undecodable
    assert reason == f"BlockStored has {64 * 32_769} tokens; at most {MAX_EVENT_TOKENS} are allowed"


WRONG_SIZE = ["BlockStored", [*range(40)], None, [], 0]


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([["BlockRemoved", [*range(40)]]] * 65_536, f"batch names more than {MAX_BATCH_BLOCKS} blocks"),
        ([["BlockRemoved", [1] * (MAX_BATCH_BLOCKS // 2)]] * 3, f"batch names more than {MAX_BATCH_BLOCKS} blocks"),
        ([["BlockRemoved", [1] * MAX_BATCH_BLOCKS, "TAPE"]] * 3, f"batch names more than {MAX_BATCH_BLOCKS} blocks"),
        ([["Novel"]] * 65_536, f"more than {MAX_UNDECODABLE} events can't be read; the first: event is no"),
        ([WRONG_SIZE] * 1_000, f"more than {MAX_UNDECODABLE} events can't be read"),
    ],
    ids=["many events", "few events", "events that are refused", "unknown events", "wrong events"],
)
def test_a_batch_is_read_no_further_than_its_limits(events: list[object], reason: str) -> None:
    payload = msgspec.msgpack.encode([0.0, events])
    read: list[int] = []

    def decode() -> None:
        with pytest.raises(WireError, match=reason):
            decode_batch(payload)
        read.append(1)

    assert steps(decode) < 10 * MAX_BATCH_BLOCKS
    assert read


def test_a_batch_of_as_many_blocks_as_are_allowed_is_read() -> None:
    events = [["BlockRemoved", [*range(MAX_BATCH_BLOCKS // 8)]]] * 8
    decoded = decode_batch(msgspec.msgpack.encode([0.0, events]))
    assert (len(decoded.batch.events), decoded.undecodable) == (8, ())


def raw_events(of: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    anything = st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9) | of,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    )
    names = st.lists(of | st.integers(-(2**63), 2**64 - 1) | anything, max_size=4)
    fields = st.fixed_dictionaries(
        {"type": st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"]) | anything},
        optional={
            "block_hashes": names | anything,
            "parent_block_hash": of | anything,
            "token_ids": st.lists(st.integers(0, 9) | anything, max_size=4) | anything,
            "block_size": st.integers(-2, 3) | anything,
            "medium": st.sampled_from(["GPU", "disk", "TAPE", None]) | anything,
            "lora_name": anything,
        },
    )
    arrays = st.tuples(st.sampled_from(["BlockStored", "BlockRemoved"]), names, of, anything, st.integers(-2, 3))
    events = st.lists(fields | arrays | anything, max_size=4) | anything
    stamp = st.floats() | anything
    batches = st.tuples(stamp, events) | st.tuples(stamp, events, anything)
    return (batches | st.fixed_dictionaries({"ts": stamp, "events": events})).map(msgspec.msgpack.encode)


@settings(max_examples=examples(400), deadline=None)
@given(st.binary(max_size=200) | raw_events(st.binary(max_size=40)), st.data())
def test_any_bytes_are_decoded_within_the_limits_or_raise_the_one_error(payload: bytes, data: st.DataObject) -> None:
    if payload and data.draw(st.booleans()):  # a flipped byte somewhere
        place = data.draw(st.integers(0, len(payload) - 1))
        payload = payload[:place] + bytes([data.draw(st.integers(0, 255))]) + payload[place + 1 :]
    try:
        decoded = decode_batch(payload)
    except WireError:
        return
    assert all(len(reason) < 400 for reason in decoded.undecodable)
    for event in decoded.batch.events:
        if isinstance(event, AllBlocksCleared):
            continue
        assert event.block_hashes
        assert all(8 <= len(name) <= 32 for name in event.block_hashes)
        if isinstance(event, BlockStored):
            assert 1 <= event.block_size_tokens <= 65_536
            assert event.parent not in event.block_hashes
    again = decode_batch(encode_batch(decoded.batch))
    assert (again.batch, again.undecodable) == (decoded.batch, ())


HEAD = b"\x92\xcb" + bytes(8)
LIAR = HEAD + b"\x91" + msgspec.msgpack.encode(STORED)[:-1]


@pytest.mark.parametrize(
    "payload",
    [
        b"\xdd\xff\xff\xff\xff",
        HEAD + b"\xdd\x00\x00\xff\xff",
        HEAD + b"\x91\x82\xa4type\xacBlockRemoved\xacblock_hashes\xdd\x00\x0f\xff\xff",
        HEAD + b"\x91\x92\xacBlockRemoved\xc6\xff\xff\xff\xff",
        LIAR + b"\xdf\xff\xff\xff\xff",
        LIAR + b"\xc9\xff\xff\xff\xff\x01",
        b"\x92\x01" + b"\x91" * 100_000,
        msgspec.msgpack.encode([1.0, [STORED | {"novel": [[]] * 1_000_000, "lora_id": [[]] * 1_000_000}]]),
    ],
    ids=["batch", "events", "hashes", "bytes", "map", "extension", "deep", "what is not read"],
)
def test_memory_follows_what_a_payload_contains_and_not_what_it_claims(payload: bytes) -> None:
    tracemalloc.start()
    try:
        decode_batch(payload)
    except WireError:
        pass
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak_bytes < 1_000_000


@given(events, st.integers(1, 5))
def test_slices_of_an_event_say_what_it_says_in_its_order(event: KvEvent, max_blocks: int) -> None:
    parts = list(sliced(event, max_blocks))
    if isinstance(event, AllBlocksCleared):
        assert parts == [event]
        return
    assert [name for part in parts for name in part.block_hashes] == list(event.block_hashes)  # type: ignore[union-attr]
    assert all(len(part.block_hashes) <= max_blocks for part in parts)  # type: ignore[union-attr]
    if isinstance(event, BlockStored):
        above = event.parent
        for part in parts:
            assert isinstance(part, BlockStored)
            assert part.parent == above
            assert len(part.token_ids) in {0, len(part.block_hashes) * event.block_size_tokens}
            above = part.block_hashes[-1]
        assert sum((part.token_ids for part in parts if isinstance(part, BlockStored)), ()) == event.token_ids


def test_sequence_frames_are_eight_bytes_big_endian() -> None:
    assert encode_seq(Seq(258)) == b"\0\0\0\0\0\0\x01\x02"
    assert decode_seq(encode_seq(Seq(258))) == 258
    assert decode_seq(encode_seq(Seq(MAX_SEQ))) == MAX_SEQ


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"abc", "3 bytes long, not 8"),
        (b"", "0 bytes long, not 8"),
        (encode_seq(Seq(-5)), "sequence number is -5; it is from 0 to 9007199254740991"),
        (encode_seq(Seq(2**62)), "sequence number is 4611686018427387904"),
        (END_OF_REPLAY, "sequence number is -1"),
    ],
)
def test_a_number_that_can_not_be_is_refused(frame: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decode_seq(frame)
