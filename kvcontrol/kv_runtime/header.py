"""Header pages that name the block of each slot, in files and in shared memory.

    checksum of all that follows · magic · slot · payload length · payload checksum · key · parent · tokens · tenant

Little-endian, zero-padded to whole pages, so that it can be read and written by direct I/O. One page does for blocks
of up to about 980 tokens; ``header_bytes_for`` has what longer blocks need. A record has exactly one encoding. The slot
number is in it: a page that ends up in another place (a misdirected write, a copied file part) isn't taken for one that
belongs there.
"""

import struct

import xxhash

from kvcontrol.core.hashing import HASH_BYTES, TOKEN_BYTES
from kvcontrol.core.ids import BlockHash
from kvcontrol.kv_runtime.record import BlockRecord, BlockSeal

PAGE_BYTES = 4096
"""Headers and slots begin at multiples of it, so that direct I/O and page-wise DMA can use them as they are."""

HEADER_BYTES = PAGE_BYTES
"""The shortest header."""

MAX_TENANT_BYTES = 64
"""What every header has room for, beside the block's tokens."""

_MAGIC = b"kvblock\x02"
_CHECKSUM = struct.Struct("<Q")
_FIXED = struct.Struct(f"<8sQQQ{HASH_BYTES}sB{HASH_BYTES}sIH")
_MAGIC_AT = slice(_CHECKSUM.size, _CHECKSUM.size + len(_MAGIC))

_NO_PARENT = bytes(HASH_BYTES)


def header_bytes_for(block_tokens: int) -> int:
    """Return the whole pages that the header of a block of so many tokens takes, with any tenant's name."""
    needed = _CHECKSUM.size + _FIXED.size + block_tokens * TOKEN_BYTES + MAX_TENANT_BYTES
    return -(-needed // PAGE_BYTES) * PAGE_BYTES


def variable_bytes(header_bytes: int) -> int:
    """Return the largest size of a record's tokens and tenant name in a header of so many bytes."""
    return header_bytes - _CHECKSUM.size - _FIXED.size


def encode_header(seal: BlockSeal, *, slot: int, payload_bytes: int, header_bytes: int = HEADER_BYTES) -> bytes:
    """Return the header for a slot, about 1 us.

    Raises ``ValueError`` for a record that can't be written down: hashes of another length than ``HASH_BYTES``, or
    more than ``variable_bytes`` of tokens and tenant.
    """
    record = seal.record
    parent = record.parent
    tenant = record.tenant.encode()
    if len(record.key) != HASH_BYTES or (parent is not None and len(parent) != HASH_BYTES):
        raise ValueError(f"block {record.key.hex()}: keys and parents are {HASH_BYTES} bytes long")
    if len(record.tokens) + len(tenant) > variable_bytes(header_bytes):
        raise ValueError(
            f"block {record.key.hex()}: {len(record.tokens)} bytes of tokens and a tenant's name of {len(tenant)} "
            f"bytes; together at most {variable_bytes(header_bytes)} fit a header of {header_bytes}"
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
    body = (fixed + record.tokens + tenant).ljust(header_bytes - _CHECKSUM.size, b"\0")
    return _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body)) + body


def decode_header(
    page: bytes | memoryview, *, slot: int, payload_bytes: int, header_bytes: int = HEADER_BYTES
) -> BlockSeal | None:
    """Return the content of a header for its slot, or None if it is not an intact header of that slot."""
    if len(page) != header_bytes or page[_MAGIC_AT] != _MAGIC:
        return None
    page = bytes(page)
    body = page[_CHECKSUM.size :]
    if _CHECKSUM.unpack_from(page)[0] != xxhash.xxh3_64_intdigest(body):
        return None
    _, at, length, checksum, key, has_parent, parent, token_bytes, tenant_bytes = _FIXED.unpack_from(body)
    if (at, length) != (slot, payload_bytes) or token_bytes + tenant_bytes > variable_bytes(header_bytes):
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
