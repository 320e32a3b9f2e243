import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcontrol.core.ids import BlockHash
from kvcontrol.kv_runtime import BlockRecord, BlockSeal
from kvcontrol.kv_runtime.header import (
    HEADER_BYTES,
    MAX_TENANT_BYTES,
    PAGE_BYTES,
    decode_header,
    encode_header,
    header_bytes_for,
    variable_bytes,
)

HASHES = st.binary(min_size=16, max_size=16).map(BlockHash)
U64 = st.integers(0, 2**64 - 1)
SEALS = st.builds(
    BlockSeal,
    st.builds(
        BlockRecord,
        key=HASHES,
        parent=st.none() | HASHES,
        tokens=st.binary(max_size=1024),
        tenant=st.text(max_size=200),
    ),
    U64,
)
SLOTS = st.integers(0, 2**40)


def _seal(*, tokens: bytes = b"\1\0\0\0", tenant: str = "a", key: bytes = bytes(16)) -> BlockSeal:
    return BlockSeal(BlockRecord(key=BlockHash(key), parent=None, tokens=tokens, tenant=tenant), 5)


@given(seal=SEALS, slot=SLOTS, payload_bytes=SLOTS)
def test_a_page_says_again_what_was_written(seal: BlockSeal, slot: int, payload_bytes: int) -> None:
    page = encode_header(seal, slot=slot, payload_bytes=payload_bytes)
    assert len(page) == HEADER_BYTES
    assert decode_header(page, slot=slot, payload_bytes=payload_bytes) == seal
    assert decode_header(memoryview(page), slot=slot, payload_bytes=payload_bytes) == seal


@given(page=st.binary(max_size=2 * HEADER_BYTES))
def test_any_other_bytes_say_nothing(page: bytes) -> None:
    assert decode_header(page, slot=0, payload_bytes=64) is None
    assert decode_header(page.ljust(HEADER_BYTES, b"\0")[:HEADER_BYTES], slot=0, payload_bytes=64) is None


@given(seal=SEALS, at=st.integers(0, HEADER_BYTES - 1), flip=st.integers(1, 255))
def test_a_page_with_a_changed_byte_says_nothing(seal: BlockSeal, at: int, flip: int) -> None:
    page = bytearray(encode_header(seal, slot=3, payload_bytes=64))
    page[at] ^= flip
    assert decode_header(bytes(page), slot=3, payload_bytes=64) is None


@given(first=SEALS, second=SEALS, cut=st.integers(0, HEADER_BYTES))
def test_a_page_torn_between_two_records_is_one_of_them_or_nothing(
    first: BlockSeal, second: BlockSeal, cut: int
) -> None:
    pages = [encode_header(seal, slot=3, payload_bytes=64) for seal in (first, second)]
    assert decode_header(pages[0][:cut] + pages[1][cut:], slot=3, payload_bytes=64) in (first, second, None)


@given(seal=SEALS, slot=SLOTS, other=SLOTS)
def test_a_page_counts_in_its_own_slot_and_for_its_own_length_alone(seal: BlockSeal, slot: int, other: int) -> None:
    page = encode_header(seal, slot=slot, payload_bytes=64)
    assert (decode_header(page, slot=other, payload_bytes=64) is None) == (other != slot)
    assert decode_header(page, slot=slot, payload_bytes=65) is None


def test_the_empty_page_says_nothing() -> None:
    assert decode_header(bytes(HEADER_BYTES), slot=0, payload_bytes=64) is None


def test_random_pages_with_the_right_beginning_say_nothing() -> None:
    rng = random.Random(1)  # noqa: S311 - reproducible, not secret
    start = encode_header(_seal(), slot=0, payload_bytes=64)[:64]
    for _ in range(200):
        assert decode_header(start + rng.randbytes(HEADER_BYTES - 64), slot=0, payload_bytes=64) is None


def test_what_just_fits_is_written_and_what_does_not_is_refused() -> None:
    most = variable_bytes(HEADER_BYTES)
    fits = _seal(tokens=bytes(most - 2), tenant="ab")
    assert decode_header(encode_header(fits, slot=0, payload_bytes=1), slot=0, payload_bytes=1) == fits
    with pytest.raises(ValueError, match=f"at most {most}"):
        encode_header(_seal(tokens=bytes(most - 1), tenant="ab"), slot=0, payload_bytes=1)


def test_a_key_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        encode_header(_seal(key=b"short"), slot=0, payload_bytes=1)


@given(block_tokens=st.integers(1, 65_536), tenant=st.text(max_size=MAX_TENANT_BYTES // 4), parent=st.none() | HASHES)
def test_a_block_of_any_size_has_a_header_of_whole_pages_that_holds_it(
    block_tokens: int, tenant: str, parent: BlockHash | None
) -> None:
    size = header_bytes_for(block_tokens)
    tokens = bytes([7]) * (4 * block_tokens)
    seal = BlockSeal(BlockRecord(key=BlockHash(bytes(16)), parent=parent, tokens=tokens, tenant=tenant), 5)
    page = encode_header(seal, slot=3, payload_bytes=64, header_bytes=size)
    assert len(page) == size
    assert size % PAGE_BYTES == 0
    assert decode_header(page, slot=3, payload_bytes=64, header_bytes=size) == seal
    assert decode_header(page[:PAGE_BYTES], slot=3, payload_bytes=64, header_bytes=size) == (
        seal if size == PAGE_BYTES else None
    )
