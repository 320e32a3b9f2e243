"""The record of a block beside its bytes, and the seal that verifies the bytes."""

from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from kvcontrol.core.hashing import HASH_BYTES
from kvcontrol.core.ids import BlockHash


class BlockRecord(NamedTuple):
    """A block below HBM: ``key`` is its chained hash, ``tokens`` its own packed token ids (compared before use).

    ``parent`` is None for the first block of a prompt. ``tenant`` is who the block is accounted to.
    """

    key: BlockHash
    parent: BlockHash | None
    tokens: bytes
    tenant: str


class BlockSeal(NamedTuple):
    """A record with the checksum of the block's bytes, taken when they reached host memory."""

    record: BlockRecord
    checksum: int


class Recovered(NamedTuple):
    """A block found again after a restart. Its record is intact; its bytes are verified when they are read."""

    slot: int
    seal: BlockSeal


def check_path(records: Sequence[BlockRecord], *, record_bytes: int) -> None:
    """Raise ``ValueError`` for a path that can't be one, or a record that no tier can write down: its tokens and its
    tenant's name take more than ``record_bytes``.
    """
    if len({record.key for record in records}) != len(records):
        raise ValueError("a path names a block twice; each may come once")
    for record in records:
        if len(record.key) != HASH_BYTES or len(record.parent or record.key) != HASH_BYTES:
            raise ValueError(f"block {record.key.hex()}: keys and parents are {HASH_BYTES} bytes long")
        if len(record.tokens) + len(record.tenant.encode()) > record_bytes:
            raise ValueError(
                f"block {record.key.hex()}: {len(record.tokens)} bytes of tokens and a tenant's name of "
                f"{len(record.tenant.encode())} bytes; together at most {record_bytes} can be kept"
            )


def checksum(data: bytes | bytearray | memoryview) -> int:
    """Return the 64-bit XXH3 of a block's bytes; releases the GIL, tens of GB/s.

    It finds what hardware and software break (a flipped bit, a torn write), not what an attacker forges: files and
    shared memory are readable and writable by the server's own user alone.
    """
    return xxhash.xxh3_64_intdigest(data)
