"""Compressed bodies: what they hold, and what is refused, whatever was made of them."""

import gzip
import random
import time
import tracemalloc
import zlib
from collections.abc import Callable

import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import BodyTooLargeError, InvalidRequestError, UnsupportedMediaTypeError
from gateway.http.content_encoding import Decoding, coding_of, decode, decoded

LIMIT = 8 << 20
ENCODERS: dict[bytes, Callable[[bytes], bytes]] = {
    b"gzip": gzip.compress,
    b"x-gzip": gzip.compress,
    b"deflate": zlib.compress,
    b"zstd": zstd.compress,
}
codings = st.sampled_from(sorted(ENCODERS))
texts = st.one_of(
    st.binary(max_size=3000),
    st.builds(lambda piece, times: piece * times, st.binary(min_size=1, max_size=50), st.integers(0, 5000)),
)


@given(codings, st.lists(texts, min_size=1, max_size=4))
def test_what_was_encoded_comes_out_in_one_member_or_several(coding: bytes, pieces: list[bytes]) -> None:
    encode = ENCODERS[coding]
    whole = b"".join(pieces)
    assert decode(encode(whole), coding, limit_bytes=LIMIT) == whole
    assert decode(b"".join(map(encode, pieces)), coding, limit_bytes=LIMIT) == whole


def raw_deflate(data: bytes) -> bytes:
    """Without the header and the checksum of zlib, as some clients send it."""
    made = zlib.compressobj(wbits=-15)
    return made.compress(data) + made.flush()


@given(st.lists(texts, min_size=1, max_size=4), st.data())
def test_deflate_may_come_without_its_header(pieces: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(pieces)
    body = raw_deflate(whole)
    assert decode(body, b"deflate", limit_bytes=LIMIT) == whole
    assert decode(b"".join(map(raw_deflate, pieces)), b"deflate", limit_bytes=LIMIT) == whole
    with pytest.raises(InvalidRequestError, match=r"cut off|is not"):
        decode(body[: data.draw(st.integers(0, len(body) - 1))], b"deflate", limit_bytes=LIMIT)
    with pytest.raises(InvalidRequestError, match="is not gzip"):
        decode(raw_deflate(b"text " * 9), b"gzip", limit_bytes=LIMIT)


@pytest.mark.parametrize("coding", sorted(ENCODERS))
def test_a_body_is_decoded_a_part_at_a_time(coding: bytes) -> None:
    whole = random.Random(1).randbytes(6 << 20)  # noqa: S311 - reproducible, not secret
    decoding = Decoding(ENCODERS[coding](whole), coding, limit_bytes=LIMIT)
    parts = 0
    while not decoding.ended:
        before = decoding.decoded_bytes
        decoding.advance(2 << 20)
        parts += 1
        assert decoding.decoded_bytes - before <= 2 << 20
    assert parts >= 3
    assert decoding.decoded() == whole


@given(codings, texts, st.integers(0, 200_000))
def test_nothing_longer_than_the_limit_comes_out(coding: bytes, text: bytes, limit: int) -> None:
    body = ENCODERS[coding](text)
    if len(text) <= limit:
        assert decode(body, coding, limit_bytes=limit) == text
    else:
        with pytest.raises(BodyTooLargeError, match="longest allowed"):
            decode(body, coding, limit_bytes=limit)


@given(codings, texts, st.data())
def test_what_is_cut_off_is_refused(coding: bytes, text: bytes, data: st.DataObject) -> None:
    body = ENCODERS[coding](text)
    with pytest.raises(InvalidRequestError, match=r"cut off|is not") as refused:
        decode(body[: data.draw(st.integers(0, len(body) - 1))], coding, limit_bytes=LIMIT)
    assert refused.value.reason == "invalid_encoding"


@given(codings, st.binary(max_size=5000), st.data())
def test_any_bytes_are_decoded_or_refused(coding: bytes, noise: bytes, data: st.DataObject) -> None:
    """Noise, noise behind what is right, and what is right with some bytes changed."""
    body = bytearray(ENCODERS[coding](b"the text " * 100) + noise)
    for place in data.draw(st.lists(st.integers(0, len(body) - 1), max_size=3)):
        body[place] ^= 1 << data.draw(st.integers(0, 7))
    for each in (noise, bytes(body)):
        try:
            found = decode(each, coding, limit_bytes=LIMIT)
        except (InvalidRequestError, BodyTooLargeError):
            continue
        assert len(found) <= LIMIT


@pytest.mark.parametrize("coding", sorted(ENCODERS))
def test_a_bomb_takes_no_more_memory_than_its_ratio_allows(coding: bytes) -> None:
    bomb = ENCODERS[coding](bytes(1 << 28))
    limit = 1 << 30
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLargeError, match="times its length"):
            decode(bomb, coding, limit_bytes=limit)
        assert tracemalloc.get_traced_memory()[1] < 128 * len(bomb) + (8 << 20)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("coding", sorted(ENCODERS))
def test_many_tiny_members_are_refused_and_some_are_not(coding: bytes) -> None:
    """That takes time: a member costs more than its bytes."""
    member = ENCODERS[coding](b"")
    assert decode(member * 4000, coding, limit_bytes=LIMIT) == b""
    with pytest.raises(InvalidRequestError, match="more than 4096 members"):
        decode(member * 200_000, coding, limit_bytes=LIMIT)


@pytest.mark.parametrize("coding", sorted(ENCODERS))
def test_time_is_linear_in_what_comes_out(coding: bytes) -> None:
    """Of the quickest of some runs, so that a busy machine is no matter."""
    seconds = []
    for size in (1 << 21, 1 << 24):
        body = ENCODERS[coding](b"".join(b"%d " % number for number in range(size // 7)))
        took = []
        for _ in range(3):
            began_s = time.process_time()
            decode(body, coding, limit_bytes=1 << 26)
            took.append(time.process_time() - began_s)
        seconds.append(min(took))
    assert seconds[1] < 8 * 5 * max(seconds[0], 1e-3), "eight times the text, and five for the clock"


@pytest.mark.parametrize(
    ("values", "coding"),
    [
        ([], None),
        ([b""], None),
        ([b"identity"], None),
        ([b"Identity, "], None),
        ([b"gzip"], b"gzip"),
        ([b" GZIP "], b"gzip"),
        ([b"identity, zstd"], b"zstd"),
        ([b"x-gzip"], b"x-gzip"),
    ],
)
def test_the_coding_of_a_body(values: list[bytes], coding: bytes | None) -> None:
    assert coding_of([(b"host", b"gzip"), *((b"content-encoding", each) for each in values)]) == coding


@pytest.mark.parametrize(
    "values", [[b"br"], [b"compress"], [b"gzip, gzip"], [b"gzip", b"zstd"], [b"gzip;q=1"], [b"\xff"]]
)
def test_other_codings_are_refused_with_what_is_allowed(values: list[bytes]) -> None:
    with pytest.raises(UnsupportedMediaTypeError, match="gzip, deflate, zstd") as refused:
        coding_of([(b"content-encoding", each) for each in values])
    assert refused.value.headers == ((b"accept-encoding", b"gzip, deflate, zstd"),)


async def test_long_bodies_are_decoded_on_a_thread_alike() -> None:
    text = b"".join(b"%d " % number for number in range(200_000))
    for coding, encode in ENCODERS.items():
        assert await decoded(encode(text), coding, limit_bytes=LIMIT) == text
        with pytest.raises(BodyTooLargeError):
            await decoded(encode(text), coding, limit_bytes=1000)
