"""KV events survive the wire in our form, in vLLM's older forms are understood, and what is broken is said."""

import msgspec
import pytest
from hypothesis import given
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
from kvcontrol.core.wire import END_OF_REPLAY, decode_batch, decode_seq, encode_batch, encode_seq

hashes = st.binary(min_size=16, max_size=16).map(BlockHash)
tiers = st.sampled_from(list(CacheTier))


@st.composite
def stored_events(draw: st.DrawFn) -> BlockStored:
    blocks = tuple(draw(st.lists(hashes, min_size=1, max_size=4)))
    size = draw(st.integers(1, 4))
    ids = st.lists(st.integers(0, 2**32 - 1), min_size=size * len(blocks), max_size=size * len(blocks))
    return BlockStored(
        block_hashes=blocks,
        parent=draw(st.none() | hashes),
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


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"type": "BlockMoved"}, "unknown event type 'BlockMoved'"),
        ({"type": "BlockStored", "block_hashes": [], "block_size": 1}, "block_hashes is missing or empty"),
        ({"type": "BlockStored", "block_hashes": [1], "block_size": 0}, "block_size is 0"),
        ({"type": "BlockStored", "block_hashes": [1], "block_size": 2, "token_ids": [1]}, "1 tokens for 1 blocks of 2"),
        ({"type": "BlockStored", "block_hashes": [1], "block_size": 1, "token_ids": ["x"]}, "not a list of integers"),
        ({"type": "BlockRemoved", "block_hashes": ["x"]}, "block hash is a str"),
        ({"type": "BlockRemoved", "block_hashes": [1], "medium": "TAPE"}, "medium is 'TAPE'"),
        (7, "neither a map with a type nor an array"),
        ([], "neither a map with a type nor an array"),
    ],
)
def test_a_broken_event_is_named_and_its_neighbours_are_kept(event: object, reason: str) -> None:
    decoded = decode_batch(msgspec.msgpack.encode([0.0, [event, ["AllBlocksCleared"]]]))
    assert decoded.batch.events == (AllBlocksCleared(),)
    assert len(decoded.undecodable) == 1
    assert reason in decoded.undecodable[0]


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode(7), msgspec.msgpack.encode(["x", []])])
def test_a_payload_that_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError):
        decode_batch(payload)


@given(st.binary(max_size=200))
def test_no_bytes_from_a_peer_raise_anything_else(payload: bytes) -> None:
    try:
        decode_batch(payload)
    except WireError:
        return


def test_sequence_frames_are_eight_bytes_big_endian() -> None:
    assert encode_seq(Seq(258)) == b"\0\0\0\0\0\0\x01\x02"
    assert decode_seq(encode_seq(Seq(258))) == 258
    assert decode_seq(END_OF_REPLAY) == -1
    with pytest.raises(WireError, match="3 bytes long, not 8"):
        decode_seq(b"abc")
