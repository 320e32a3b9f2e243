"""The TCP protocol by which one instance fetches blocks from another instance's tiers.

    borrower                              lender
    MAGIC, length, what is wanted   ->
                                    <-    OFFERED, length, offer | REFUSED, length, reason
    number of blocks                ->
                                    <-    their bytes, one after the other
    TAKEN                           ->

Blocks are named by their chained hashes, and are in prompt order. A block's checksum is that of its seal, taken when
its bytes left the engine that computed them: it holds over memory, wire and memory.
"""

import struct
from typing import TypeVar

import msgspec

from engines.lmdeploy.pd.wire import Connection, TransferError, reason_of
from kvcontrol.core.hashing import HASH_BYTES
from kvcontrol.core.ids import BlockHash

MAGIC = b"kvgate-pb-1"
OFFERED, REFUSED, TAKEN = b"O", b"R", b"T"
MAX_BODY_BYTES = 64 << 20
_LENGTH = struct.Struct("!I")
_Body = TypeVar("_Body", bound=msgspec.Struct)


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks of a path, and how their bytes must be put together (equal texts, interchangeable blocks)."""

    layout: str
    keys: list[bytes]


class BlockOffer(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks that can be had, from the first that was wanted on: for each, the hash before it (empty for a prompt's
    first block), its own packed tokens, and its checksum.
    """

    parents: list[bytes]
    tokens: list[bytes]
    checksums: list[int]


def ask(connection: Connection, wanted: Wanted) -> BlockOffer:
    """Request blocks; raises ``TransferError``, also if the peer refuses or its offer is invalid."""
    _send(connection, MAGIC, wanted)
    word = bytes(connection.receive(1))
    if word not in (OFFERED, REFUSED):
        raise TransferError("protocol", "the peer doesn't speak this protocol")
    body = _body(connection)
    if word == REFUSED:
        raise TransferError("refused", reason_of(body))
    offer = _decoded(body, BlockOffer)
    count = len(offer.checksums)
    if not 0 < count <= len(wanted.keys) or not count == len(offer.tokens) == len(offer.parents):
        raise TransferError("protocol", f"the peer offers {count} blocks of {len(wanted.keys)}")
    return offer


def read_wanted(connection: Connection) -> Wanted:
    """Read a request of ``ask``; raises ``TransferError``."""
    if bytes(connection.receive(len(MAGIC))) != MAGIC:
        raise TransferError("protocol", "the peer doesn't speak this protocol")
    wanted = _decoded(_body(connection), Wanted)
    if not wanted.keys or any(len(key) != HASH_BYTES for key in wanted.keys):
        raise TransferError("protocol", f"the peer wants no blocks, or such whose names aren't {HASH_BYTES} bytes long")
    return wanted


def path_of(wanted: Wanted) -> list[BlockHash]:
    """Return the wanted blocks' hashes."""
    return [BlockHash(key) for key in wanted.keys]


def offer_blocks(connection: Connection, offer: BlockOffer) -> int:
    """Send an offer and return how many of its blocks are taken; raises ``TransferError``."""
    _send(connection, OFFERED, offer)
    [count] = _LENGTH.unpack(connection.receive(_LENGTH.size))
    if count > len(offer.checksums):
        raise TransferError("protocol", f"the peer takes {count} blocks of {len(offer.checksums)}")
    return int(count)


def refuse(connection: Connection, reason: str) -> None:
    """Send a refusal with its reason."""
    body = reason.encode()
    connection.send(REFUSED + _LENGTH.pack(len(body)) + body)


def take(connection: Connection, blocks: int) -> None:
    """Send the number of offered blocks to transfer."""
    connection.send(_LENGTH.pack(blocks))


def _send(connection: Connection, word: bytes, what: msgspec.Struct) -> None:
    body = msgspec.msgpack.encode(what)
    if len(body) > MAX_BODY_BYTES:
        raise TransferError("layout", f"{len(body)} bytes name the blocks; allowed: {MAX_BODY_BYTES}")
    connection.send(word + _LENGTH.pack(len(body)) + body)


def _body(connection: Connection) -> bytearray:
    [size] = _LENGTH.unpack(connection.receive(_LENGTH.size))
    if size > MAX_BODY_BYTES:
        raise TransferError("protocol", f"the peer announces {size} bytes")
    return connection.receive(size)


def _decoded(body: bytearray, kind: type[_Body]) -> _Body:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise TransferError("protocol", f"malformed message of the peer: {error}") from error
