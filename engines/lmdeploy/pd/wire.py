"""The TCP protocol between a decode and a prefill instance for the handover of a prompt's KV blocks.

    decode                                prefill
    MAGIC, ticket                   ->
                                    <-    OFFERED, offer | REFUSED, reason
    GO                              ->
                                    <-    frame ... frame (length, checksum, bytes), an empty frame
    TAKEN                           ->
                                    <-    RELEASED

Every length is bounded before anything is read, every frame has its checksum, and every wait ends at the connection's
deadline: a peer that is slow, silent or talks nonsense costs its own request alone.
"""

import socket
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Self

import msgspec

from kvcontrol.core.blocks import CacheIdentity
from kvcontrol.core.hashing import TOKEN_BYTES
from kvcontrol.core.pd import TICKET_BYTES, Ticket
from kvcontrol.kv_runtime.record import checksum

MAGIC = b"kvgate-pd-1"
OFFERED, REFUSED, GO, TAKEN, RELEASED = b"O", b"R", b"G", b"T", b"L"
MAX_OFFER_BYTES = 64 << 20
MAX_FRAME_BYTES = 1 << 30
MAX_REASON_BYTES = 500
_LENGTH = struct.Struct("!I")
_FRAME = struct.Struct("!IQ")


class TransferError(RuntimeError):
    """A handover failed; ``cause`` is one word for metrics, the message has the details."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that a prefill instance holds under a ticket.

    ``tokens`` are the prompt's ids as little-endian u32, compared before a byte of KV is used; ``token_id`` is the
    first one generated. ``engine_config`` and ``pools`` are LMDeploy's own descriptions, as JSON.
    """

    epoch: str
    identity: CacheIdentity
    adapter: str
    tokens: bytes
    token_id: int
    cached_tokens: int
    session_id: int
    block_ids: list[int]
    total_bytes: int
    engine_config: dict[str, Any]
    pools: list[dict[str, Any]]


class Connection:
    """One TCP connection with a deadline over the whole exchange; ``with`` closes it."""

    def __init__(self, sock: socket.socket, *, deadline_s: float) -> None:
        self._sock = sock
        self._deadline_s = deadline_s
        if sock.family is not socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent; a thread that waits on the connection is woken."""
        with suppress(OSError):  # not connected any more
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def send(self, data: bytes | memoryview) -> None:
        """Send all of it; raises ``TransferError``."""
        try:
            self._in_time()
            self._sock.sendall(data)
        except OSError as error:
            raise _lost(error) from error

    def receive(self, size_bytes: int) -> bytearray:
        """Return exactly so many bytes; raises ``TransferError``."""
        data = bytearray(size_bytes)
        self.fill(memoryview(data))
        return data

    def fill(self, view: memoryview) -> None:
        """Receive exactly as many bytes as ``view`` has, into it; raises ``TransferError``."""
        place = 0
        try:
            while place < len(view):
                self._in_time()
                count = self._sock.recv_into(view[place:])
                if not count:
                    raise TransferError("lost", "the peer closed the connection")
                place += count
        except OSError as error:
            raise _lost(error) from error

    def _in_time(self) -> None:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TransferError("timeout", "the transfer took too long")
        self._sock.settimeout(left_s)


def ask(connection: Connection, ticket: Ticket) -> Offer:
    """Request the prompt held under ``ticket``; raises ``TransferError``, also if the peer refuses."""
    connection.send(MAGIC + bytes.fromhex(ticket))
    answer = bytes(connection.receive(1))
    [size] = _LENGTH.unpack(connection.receive(_LENGTH.size))
    if answer not in (OFFERED, REFUSED) or size > MAX_OFFER_BYTES:
        raise TransferError("protocol", "the peer doesn't speak this protocol")
    body = connection.receive(size)
    if answer == REFUSED:
        raise TransferError("refused", reason_of(body))
    try:
        offer = msgspec.msgpack.decode(body, type=Offer)
    except (msgspec.MsgspecError, ValueError) as error:
        raise TransferError("protocol", f"the peer's offer is malformed: {error}") from error
    tokens = len(offer.tokens) // TOKEN_BYTES
    if not 0 <= offer.cached_tokens <= tokens:
        raise TransferError("protocol", f"the peer reports {offer.cached_tokens} of {tokens} tokens as cached")
    return offer


def reason_of(body: bytearray) -> str:
    """Return why a peer refuses, in its words, as far as they fit a line of a log."""
    reason = body[:MAX_REASON_BYTES].decode(errors="replace")
    return "".join(letter if letter.isprintable() else "?" for letter in reason)


def read_ticket(connection: Connection) -> Ticket:
    """Read a request of ``ask``; raises ``TransferError``."""
    if bytes(connection.receive(len(MAGIC))) != MAGIC:
        raise TransferError("protocol", "the peer doesn't speak this protocol")
    return Ticket(connection.receive(TICKET_BYTES).hex())


def answer(connection: Connection, found: Offer | TransferError) -> None:
    """Send an offer, or why there is none."""
    if isinstance(found, Offer):
        body, word = msgspec.msgpack.encode(found), OFFERED
    else:
        body, word = str(found).encode(), REFUSED
    connection.send(word + _LENGTH.pack(len(body)) + body)


def send_frames(connection: Connection, parts: Iterable[memoryview]) -> None:
    """Send pieces of KV, each with its checksum, and the end."""
    for part in parts:
        connection.send(_FRAME.pack(part.nbytes, checksum(part)))
        connection.send(part)
    connection.send(_FRAME.pack(0, 0))


def receive_frames(connection: Connection, total_bytes: int) -> bytearray:
    """Return all pieces as one, verified; raises ``TransferError`` unless they are ``total_bytes`` in all."""
    data = bytearray()
    while True:
        size, expected = _FRAME.unpack(connection.receive(_FRAME.size))
        if size == 0:
            break
        if size > min(MAX_FRAME_BYTES, total_bytes - len(data)):
            raise TransferError("protocol", "the peer sends more than it offered")
        part = connection.receive(size)
        if checksum(part) != expected:
            raise TransferError("checksum", "bytes changed on their way")
        data += part
    if len(data) != total_bytes:
        raise TransferError("protocol", f"the peer sent {len(data)} of {total_bytes} bytes")
    return data


def expect(connection: Connection, word: bytes) -> None:
    """Read one word; raises ``TransferError`` when it is another."""
    if bytes(connection.receive(len(word))) != word:
        raise TransferError("protocol", "unexpected message of the peer")


def _lost(error: OSError) -> TransferError:
    if isinstance(error, TimeoutError):
        return TransferError("timeout", "the transfer took too long")
    return TransferError("lost", f"the connection was lost: {error.strerror or error}")
