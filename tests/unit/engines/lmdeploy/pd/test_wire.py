"""What the two instances say to each other, and every way that a peer can get it wrong."""

import errno
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import pytest

from engines.lmdeploy.pd.hand_over import hand_over
from engines.lmdeploy.pd.networks import LOOPBACK, parse_networks
from engines.lmdeploy.pd.peers import Peers
from engines.lmdeploy.pd.server import MAX_CONNECTIONS, PdServer
from engines.lmdeploy.pd.wire import (
    GO,
    MAGIC,
    MAX_OFFER_BYTES,
    MAX_REASON_BYTES,
    OFFERED,
    REFUSED,
    RELEASED,
    TAKEN,
    Connection,
    Offer,
    TransferError,
    ask,
    expect,
    receive_frames,
)
from kvcontrol.core.blocks import CacheIdentity
from kvcontrol.core.pd import Ticket
from kvcontrol.kv_runtime.record import checksum
from tests.support.processes import eventually

TICKET = Ticket("5a" * 16)
PIECES = [bytes(range(256)) * 4, b"x" * 300]
TOTAL = sum(map(len, PIECES))
OFFER = Offer(
    epoch="e",
    identity=CacheIdentity(model="m", revision="r", kv_dtype="float32", block_size_tokens=16),
    adapter="",
    tokens=b"\x01\0\0\0",
    token_id=7,
    cached_tokens=0,
    session_id=3,
    block_ids=[4, 5],
    total_bytes=TOTAL,
    engine_config={},
    pools=[],
)


@dataclass
class Shelf:
    """A ``Larder`` with one ticket on it."""

    ends: list[bool] = field(default_factory=list)
    gone: bool = False

    def begin(self, ticket: Ticket) -> Offer:
        if ticket != TICKET:
            raise TransferError("refused", "nothing is held")
        return OFFER

    def pieces(self, offer: Offer) -> Iterator[memoryview]:
        assert offer is OFFER
        yield from map(memoryview, PIECES)

    def still(self, ticket: Ticket) -> bool:
        assert ticket == TICKET
        return not self.gone

    def end(self, ticket: Ticket, *, taken: bool) -> None:
        assert ticket == TICKET
        self.ends.append(taken)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def server(shelf: Shelf) -> Iterator[PdServer]:
    server = PdServer(partial(hand_over, shelf), loopback(), host="127.0.0.1", port=0, timeout_s=20.0)
    server.start()
    yield server
    server.close()


def loopback() -> Peers:
    return Peers(parse_networks(LOOPBACK))


def connect(server: PdServer) -> Connection:
    return loopback().connect("127.0.0.1", server.port, timeout_s=20.0)


def test_what_is_held_is_handed_over_once(server: PdServer, shelf: Shelf) -> None:
    with connect(server) as connection:
        assert ask(connection, TICKET) == OFFER
        connection.send(GO)
        assert bytes(receive_frames(connection, TOTAL)) == b"".join(PIECES)
        connection.send(TAKEN)
        expect(connection, RELEASED)
    assert shelf.ends == [True]


def test_a_ticket_that_is_none_is_refused_with_the_reason(server: PdServer, shelf: Shelf) -> None:
    with connect(server) as connection, pytest.raises(TransferError, match="nothing is held") as refused:
        ask(connection, Ticket("00" * 16))
    assert refused.value.cause == "refused"
    assert shelf.ends == []


@pytest.mark.parametrize("after", [ask, lambda connection, ticket: (ask(connection, ticket), connection.send(GO))])
def test_a_peer_that_leaves_does_not_take(
    server: PdServer, shelf: Shelf, after: Callable[[Connection, Ticket], object]
) -> None:
    with connect(server) as connection:
        after(connection, TICKET)
    eventually(lambda: shelf.ends == [False], 20, "the end of the reading")


def test_bytes_that_were_taken_away_while_they_were_read_are_not_handed_over(server: PdServer, shelf: Shelf) -> None:
    shelf.gone = True
    with connect(server) as connection:
        ask(connection, TICKET)
        connection.send(GO)
        with pytest.raises(TransferError) as lost:
            receive_frames(connection, TOTAL)
    assert lost.value.cause == "lost"
    eventually(lambda: shelf.ends == [False], 20, "the end of the reading")


def test_nonsense_costs_nothing(server: PdServer, shelf: Shelf) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" + b"\0" * 64)
        assert not _rest(sock)
    assert shelf.ends == []
    test_what_is_held_is_handed_over_once(server, shelf)


class Scarce:
    """A server socket of a process that has no file, or no thread, for its first connections."""

    def __init__(self, own: socket.socket, failures: int) -> None:
        self._own = own
        self.left = failures

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        if self.left:
            self.left -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._own.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def test_a_door_that_had_no_file_left_opens_again(shelf: Shelf) -> None:
    server = PdServer(partial(hand_over, shelf), loopback(), host="127.0.0.1", port=0, timeout_s=20.0)
    scarce = Scarce(server._socket, 2)
    server._socket = scarce  # type: ignore[assignment]
    server.start()
    try:
        test_what_is_held_is_handed_over_once(server, shelf)
        assert not scarce.left
    finally:
        server.close()


def test_a_connection_that_gets_no_thread_is_closed_and_its_place_is_free(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = PdServer(partial(hand_over, shelf), loopback(), host="127.0.0.1", port=0, timeout_s=20.0)
    server.start()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", _no_thread)
            for _ in range(MAX_CONNECTIONS + 1):
                with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
                    assert not _rest(sock)
        test_what_is_held_is_handed_over_once(server, shelf)
    finally:
        server.close()


def _no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_host_that_is_no_peer_is_not_served() -> None:
    elsewhere = Peers(parse_networks("10.1.0.0/16"))
    server = PdServer(partial(hand_over, Shelf()), elsewhere, host="127.0.0.1", port=0, timeout_s=20.0)
    server.start()
    try:
        with connect(server) as connection, pytest.raises(TransferError):
            ask(connection, TICKET)
        with pytest.raises(TransferError, match="not in the list"):
            elsewhere.connect("127.0.0.1", server.port, timeout_s=5.0)
    finally:
        server.close()


def test_silent_peers_take_no_more_places_than_there_are_and_no_longer_than_they_may(shelf: Shelf) -> None:
    server = PdServer(partial(hand_over, shelf), loopback(), host="127.0.0.1", port=0, timeout_s=0.5)
    server.start()
    try:
        silent = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(MAX_CONNECTIONS + 8)]
        for sock in silent:
            assert not _rest(sock)
            sock.close()
        with connect(server) as connection:
            assert ask(connection, TICKET) == OFFER
    finally:
        server.close()


def _rest(sock: socket.socket) -> bytes:
    """What the other side says before it closes; a reset is a close."""
    try:
        return sock.recv(1 << 16)
    except ConnectionError:
        return b""


def frame(data: bytes, *, sum_of: bytes | None = None) -> bytes:
    return struct.pack("!IQ", len(data), checksum(data if sum_of is None else sum_of)) + data


END = struct.pack("!IQ", 0, 0)
WRONG_FRAMES = {
    "checksum": frame(b"abcd", sum_of=b"abce") + END,
    "too much": frame(b"abcdefghi") + END,
    "too little": frame(b"abc") + END,
    "huge": struct.pack("!IQ", 2**32 - 1, 0),
    "cut": frame(b"abcd")[:-2],
}


@pytest.mark.parametrize("wrong", WRONG_FRAMES)
def test_frames_that_are_wrong_are_not_used(wrong: str) -> None:
    with _speaking(WRONG_FRAMES[wrong]) as connection, pytest.raises(TransferError):
        receive_frames(connection, 8)


@pytest.mark.parametrize(
    "answer",
    [b"", b"X\0\0\0\0", b"O" + struct.pack("!I", MAX_OFFER_BYTES + 1), b"O\0\0\0\4abcd", b"O\0\0\0\x05abc"],
)
def test_an_offer_that_is_none_is_an_error(answer: bytes) -> None:
    with _speaking(answer) as connection, pytest.raises(TransferError):
        ask(connection, TICKET)


@pytest.mark.parametrize("cached_tokens", [-1, 2, 1 << 40])
def test_an_offer_that_cannot_be_true_is_an_error(cached_tokens: int) -> None:
    body = msgspec.msgpack.encode(msgspec.structs.replace(OFFER, cached_tokens=cached_tokens))
    said = OFFERED + struct.pack("!I", len(body)) + body
    with _speaking(said) as connection, pytest.raises(TransferError, match="1 tokens as cached") as refused:
        ask(connection, TICKET)
    assert refused.value.cause == "protocol"


def test_a_reason_is_a_line_of_a_log_however_long_it_is() -> None:
    body = "no\nroom \u2603 ".encode() * 1000
    said = REFUSED + struct.pack("!I", len(body)) + body
    with _speaking(said) as connection, pytest.raises(TransferError, match=r"^no\?room \u2603 no") as refused:
        ask(connection, TICKET)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) <= MAX_REASON_BYTES


@pytest.mark.parametrize("host", ["a..b", "a" * 64 + ".b", "nowhere.invalid"])
def test_a_host_that_can_have_no_address_is_unreachable(host: str) -> None:
    with pytest.raises(TransferError) as failed:
        Peers(parse_networks(LOOPBACK)).connect(host, 1, timeout_s=5)
    assert failed.value.cause == "unreachable"


def test_a_silent_peer_is_given_up_at_the_deadline() -> None:
    mine, other = socket.socketpair()
    with other, Connection(mine, deadline_s=time.monotonic() + 0.2) as connection:
        with pytest.raises(TransferError) as late:
            connection.receive(1)
        with pytest.raises(TransferError):
            connection.send(b"x")
    assert late.value.cause == "timeout"


def test_closing_wakes_who_waits() -> None:
    mine, other = socket.socketpair()
    connection = Connection(mine, deadline_s=time.monotonic() + 60)
    failures: list[TransferError] = []

    def wait() -> None:
        try:
            connection.receive(1)
        except TransferError as error:
            failures.append(error)

    waiting = threading.Thread(target=wait)
    with other:
        waiting.start()
        connection.close()
        waiting.join(20)
    assert not waiting.is_alive()
    assert len(failures) == 1


def test_the_magic_is_what_a_fetch_begins_with() -> None:
    mine, other = socket.socketpair()
    with other, Connection(mine, deadline_s=time.monotonic() + 5) as connection:
        other.sendall(b"R\0\0\0\0")
        with pytest.raises(TransferError):
            ask(connection, TICKET)
        assert other.recv(100) == MAGIC + bytes.fromhex(TICKET)


def _speaking(said: bytes) -> Connection:
    mine, other = socket.socketpair()
    other.sendall(said)
    other.shutdown(socket.SHUT_WR)
    _kept.append(other)
    return Connection(mine, deadline_s=time.monotonic() + 20)


_kept: list[socket.socket] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _kept:
        _kept.pop().close()


@pytest.mark.parametrize("text", ["", " , ", "10.0.0.0/33", "localhost"])
def test_a_network_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"network|localhost"):
        parse_networks(text)


def test_an_ipv4_address_in_an_ipv6_socket_is_that_address() -> None:
    peers = loopback()
    assert peers.admits("::ffff:127.0.0.1")
    assert peers.admits("::1")
    assert not peers.admits("::ffff:10.0.0.1")
    assert not peers.admits("no address")
