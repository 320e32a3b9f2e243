"""What a block is besides its bytes, and the seal that says whether bytes are still those."""

from typing import NamedTuple

import xxhash

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


def checksum(data: bytes | bytearray | memoryview) -> int:
    """Return the 64-bit XXH3 of a block's bytes; releases the GIL, tens of GB/s.

    It finds what hardware and software break (a flipped bit, a torn write), not what an attacker forges: files and
    shared memory are readable and writable by the server's own user alone.
    """
    return xxhash.xxh3_64_intdigest(data)


__all__ = ["BlockRecord", "BlockSeal", "Recovered", "checksum"]
