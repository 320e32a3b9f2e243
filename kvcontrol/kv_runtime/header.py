"""The page that says which block a slot holds, in files and in shared memory.

    checksum of all that follows · magic · slot · payload length · payload checksum · key · parent · tokens · tenant

Little-endian, zero-padded to one page, so that it can be read and written by direct I/O. A record has exactly one
encoding. The slot number is in it: a page that ends up in another place (a misdirected write, a copied file part)
isn't taken for one that belongs there.
"""

import struct

import xxhash

from kvcontrol.core.hashing import HASH_BYTES
from kvcontrol.core.ids import BlockHash
from kvcontrol.kv_runtime.record import BlockRecord, BlockSeal

HEADER_BYTES = 4096

_MAGIC = b"kvblock\x01"
_CHECKSUM = struct.Struct("<Q")
_FIXED = struct.Struct(f"<8sQQQ{HASH_BYTES}sB{HASH_BYTES}sHH")
_MAGIC_AT = slice(_CHECKSUM.size, _CHECKSUM.size + len(_MAGIC))

MAX_VARIABLE_BYTES = HEADER_BYTES - _CHECKSUM.size - _FIXED.size
"""What a record's tokens and its tenant's name may take together."""

EMPTY_HEADER = bytes(HEADER_BYTES)
"""The page of a slot that holds nothing."""

_NO_PARENT = bytes(HASH_BYTES)


def encode_header(seal: BlockSeal, *, slot: int, payload_bytes: int) -> bytes:
    """Return the page for a slot, about 1 us.

    Raises ``ValueError`` for a record that can't be written down: hashes of another length than ``HASH_BYTES``, or
    more than ``MAX_VARIABLE_BYTES`` of tokens and tenant.
    """
    record = seal.record
    parent = record.parent
    tenant = record.tenant.encode()
    if len(record.key) != HASH_BYTES or (parent is not None and len(parent) != HASH_BYTES):
        raise ValueError(f"block {record.key.hex()}: keys and parents are {HASH_BYTES} bytes long")
    if len(record.tokens) + len(tenant) > MAX_VARIABLE_BYTES:
        raise ValueError(
            f"block {record.key.hex()}: {len(record.tokens)} bytes of tokens and a tenant's name of {len(tenant)} "
            f"bytes; together at most {MAX_VARIABLE_BYTES} fit a header"
        )
    fixed = _FIXED.pack(
        _MAGIC,
        slot,
        payload_bytes,
        seal.checksum,
        record.key,
        parent is not None,
        _NO_PARENT if parent is None else parent,
        len(record.tokens),
        len(tenant),
    )
    body = (fixed + record.tokens + tenant).ljust(HEADER_BYTES - _CHECKSUM.size, b"\0")
    return _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body)) + body


def decode_header(page: bytes | memoryview, *, slot: int, payload_bytes: int) -> BlockSeal | None:
    """Return what a page says about its slot, or None when it isn't a whole, intact header of that very slot."""
    if len(page) != HEADER_BYTES or page[_MAGIC_AT] != _MAGIC:
        return None
    page = bytes(page)
    body = page[_CHECKSUM.size :]
    if _CHECKSUM.unpack_from(page)[0] != xxhash.xxh3_64_intdigest(body):
        return None
    _, at, length, checksum, key, has_parent, parent, token_bytes, tenant_bytes = _FIXED.unpack_from(body)
    if (at, length) != (slot, payload_bytes) or token_bytes + tenant_bytes > MAX_VARIABLE_BYTES:
        return None
    tokens_end = _FIXED.size + token_bytes
    try:
        tenant = body[tokens_end : tokens_end + tenant_bytes].decode()
    except UnicodeDecodeError:
        return None
    record = BlockRecord(
        key=BlockHash(key),
        parent=BlockHash(parent) if has_parent else None,
        tokens=body[_FIXED.size : tokens_end],
        tenant=tenant,
    )
    return BlockSeal(record, checksum)


__all__ = ["EMPTY_HEADER", "HEADER_BYTES", "MAX_VARIABLE_BYTES", "decode_header", "encode_header"]
