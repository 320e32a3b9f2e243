"""A prefix index as bytes, and back: for a restart that keeps its blocks.

Format: 8 bytes magic with the version, 16 bytes BLAKE2b of the rest, then msgpack. What is torn, flipped or made for
another cache identity is refused as a whole.
"""

from hashlib import blake2b

import msgspec

from kvcontrol.core import BlockHash, CacheIdentity, IdentityError, WireError

MAX_PINS = 1_000
"""Pins of one entry that a dump may ask for."""

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
    """Return the bytes of an index."""
    body = msgspec.msgpack.encode(contents)
    return _MAGIC + _digest(body) + body


def decode(data: bytes, identity: CacheIdentity) -> Contents:
    """Read the bytes of an index; raises ``WireError`` for damaged ones, ``IdentityError`` for another identity's."""
    if data[: len(_MAGIC)] != _MAGIC:
        raise WireError(f"a prefix dump starts with {_MAGIC!r}, this with {data[: len(_MAGIC)]!r}")
    body = data[_HEAD_BYTES:]
    if data[len(_MAGIC) : _HEAD_BYTES] != _digest(body):
        raise WireError("the prefix dump is damaged: its checksum differs")
    try:
        contents = msgspec.msgpack.decode(body, type=Contents)
    except msgspec.DecodeError as error:
        raise WireError(f"the prefix dump can't be read: {error}") from error
    if contents.identity != identity:
        raise IdentityError(f"the prefix dump is for {contents.identity}, not for {identity}")
    return contents


def key_of(block: HeldBlock) -> BlockHash:
    """Return a held block's key."""
    return BlockHash(block.key)


def _digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=_DIGEST_BYTES).digest()


__all__ = ["MAX_PINS", "Contents", "HeldBlock", "HeldEntry", "decode", "encode", "key_of"]
