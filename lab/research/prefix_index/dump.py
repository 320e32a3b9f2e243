"""A prefix index as bytes, and back: for a restart that keeps its blocks.

Format: 8 bytes magic with the version, 16 bytes BLAKE2b of the rest, then msgpack. What is torn, flipped or made for
another cache identity is refused as a whole.
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import msgspec

from kvcontrol.core import BlockHash, CacheIdentity, IdentityError, WireError
from kvcontrol.core.errors import UNREADABLE

MAX_PINS = 1_000
"""Pins of one entry that a dump may ask for."""

PIECE_ITEMS = 1_000

_encoded = msgspec.msgpack.Encoder().encode
_MAP_OF_FOUR = b"\x84"
_MAGIC = b"kvgatPI1"
_DIGEST_BYTES = 16
_HEAD_BYTES = len(_MAGIC) + _DIGEST_BYTES


class HeldBlock(msgspec.Struct, frozen=True, array_like=True):
    """One block; ``parent`` is its parent's place in ``Contents.blocks``, -1 for a first block."""

    key: bytes
    parent: int
    tokens: bytes
    block_id: int


class HeldEntry(msgspec.Struct, frozen=True, array_like=True):
    """One inserted prefix: the place of its last block, and how often it is pinned."""

    tail: int
    metadata: dict[str, str]
    pins: int


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """All of an index: blocks with parents before children, places from oldest to youngest, entries."""

    identity: CacheIdentity
    blocks: list[HeldBlock]
    oldest_first: list[int]
    entries: list[HeldEntry]


def encode(contents: Contents) -> bytes:
    """Return the bytes of an index; other threads get the interpreter between any two ``pieces``."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    body = []
    for piece in pieces(contents):
        digest.update(piece)
        body.append(piece)
    return b"".join((_MAGIC, digest.digest(), *body))


def pieces(contents: Contents) -> Iterator[bytes]:
    """Yield what ``msgspec.msgpack.encode(contents)`` is, at most ``PIECE_ITEMS`` of a list at a time: the encoder
    doesn't let go of the interpreter, and 400,000 blocks at once are an eighth of a second of it.
    """
    yield _MAP_OF_FOUR + _encoded("identity") + _encoded(contents.identity)
    lists: tuple[tuple[str, Sequence[object]], ...] = (
        ("blocks", contents.blocks),
        ("oldest_first", contents.oldest_first),
        ("entries", contents.entries),
    )
    for name, items in lists:
        yield _encoded(name) + _list_head(len(items))
        for start in range(0, len(items), PIECE_ITEMS):
            some = items[start : start + PIECE_ITEMS]
            yield _encoded(some)[len(_list_head(len(some))) :]


def let_go(contents: Contents) -> None:
    """Empty the lists a piece at a time: freeing 400,000 blocks at once holds the interpreter as encoding them does."""
    for items in (contents.blocks, contents.oldest_first, contents.entries):
        while items:
            del items[-PIECE_ITEMS:]


def _list_head(length: int) -> bytes:
    """What msgpack puts before a list's items: a byte for up to 15 of them, 3 up to 65,535, or 5."""
    if length < 1 << 4:
        return bytes([0x90 | length])
    if length < 1 << 16:
        return b"\xdc" + length.to_bytes(2, "big")
    return b"\xdd" + length.to_bytes(4, "big")


def decode(data: bytes, identity: CacheIdentity) -> Contents:
    """Read the bytes of an index; raises ``WireError`` for damaged ones, ``IdentityError`` for another identity's."""
    if data[: len(_MAGIC)] != _MAGIC:
        raise WireError(f"a prefix dump starts with {_MAGIC!r}, this with {data[: len(_MAGIC)]!r}")
    body = data[_HEAD_BYTES:]
    if data[len(_MAGIC) : _HEAD_BYTES] != _digest(body):
        raise WireError("the prefix dump is damaged: its checksum differs")
    try:
        contents = msgspec.msgpack.decode(body, type=Contents)
    except UNREADABLE as error:
        raise WireError(f"the prefix dump can't be read: {error}") from error
    if contents.identity != identity:
        raise IdentityError(f"the prefix dump is for {contents.identity}, not for {identity}")
    return contents


def key_of(block: HeldBlock) -> BlockHash:
    """Return a held block's key."""
    return BlockHash(block.key)


def _digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=_DIGEST_BYTES).digest()
