"""The publisher over real sockets: live, replay, a slow subscriber, consistent snapshots, clean ends."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from engines.control.errors import RefusedError
from engines.events.log import EventLog
from engines.events.publisher import ERROR, OK, REFUSED, EndpointError, Endpoints, EventPublisher
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.events import BlockRemoved, BlockStored
from kvcontrol.core.ids import BlockHash, Seq
from kvcontrol.core.wire import END_OF_REPLAY, decode_batch, decode_seq, encode_seq

WITHIN_MS = 20_000
_MARKER = 1 << 40
"""A block whose removal is the last event before a test's own."""
ANY = "tcp://127.0.0.1:*"


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def make_log(on_pending: Callable[[], None], *, ring: int = 10_000) -> EventLog:
    return EventLog(block_size_tokens=1, clock=time.time, on_pending=on_pending, replay_batches=ring)


def resident_json(publisher: EventPublisher, _body: bytes) -> bytes:
    resident = publisher.snapshot()
    return msgspec.json.encode([resident.seq, *(block.hex() for block, _ in resident.tiers.get(CacheTier.HBM, []))])


def end_json(publisher: EventPublisher, _body: bytes) -> bytes:
    return msgspec.json.encode([publisher.log.counters().seq])


def fails(_: EventPublisher, _body: bytes) -> bytes:
    raise RuntimeError("the cache is on fire")


def echoes(_: EventPublisher, body: bytes) -> bytes:
    if not body:
        raise RefusedError("the body is empty; anything else is allowed")
    return body


@contextmanager
def publishing(tmp_path: Path, *, ring: int = 10_000, hwm: int = 10_000) -> Iterator[EventPublisher]:
    publisher = EventPublisher(
        lambda wake: make_log(wake, ring=ring),
        endpoints=Endpoints(events=ANY, replay=ANY, control=f"ipc://{tmp_path}/control"),
        hwm_batches=hwm,
        operations={b"resident": resident_json, b"end": end_json, b"fails": fails, b"echo": echoes},
    )
    publisher.start()
    try:
        yield publisher
    finally:
        publisher.close()


class Sockets:
    """Connects sockets and closes them all at the end."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._open: list[zmq.Socket[bytes]] = []

    def connect(self, kind: int, endpoint: str, *, hwm: int = 1_000) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        self._open.append(socket)
        socket.set_hwm(hwm)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.RCVBUF, 65_536)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        return socket

    def close(self) -> None:
        for socket in self._open:
            socket.close(linger=0)
        self._context.term()


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    sockets = Sockets()
    yield sockets
    sockets.close()


class Client:
    """A subscriber as a gateway would write it: live messages, and a replay for what is missing."""

    def __init__(self, sockets: Sockets, publisher: EventPublisher, *, hwm: int = 1_000) -> None:
        self.sub = sockets.connect(zmq.SUB, publisher.endpoint, hwm=hwm)
        self.dealer = sockets.connect(zmq.DEALER, publisher.replay_endpoint)
        self.last = -1
        self.gaps = 0
        self.held: set[BlockHash] = set()

    def receive(self) -> tuple[Seq, bytes]:
        assert self.sub.poll(WITHIN_MS), "no message"
        topic, seq, payload = self.sub.recv_multipart()
        assert topic == b""
        return decode_seq(seq), payload

    def replay(self, first: int) -> list[tuple[Seq, bytes]]:
        self.dealer.send_multipart((b"", encode_seq(Seq(first))))
        answers = []
        while True:
            assert self.dealer.poll(WITHIN_MS), "no answer to a replay request"
            empty, seq, payload = self.dealer.recv_multipart()
            assert empty == b""
            if seq == END_OF_REPLAY:
                assert payload == b""
                return answers
            answers.append((decode_seq(seq), payload))

    def apply(self, seq: Seq, payload: bytes) -> None:
        assert seq == self.last + 1
        self.last = seq
        for event in decode_batch(payload).batch.events:
            match event:
                case BlockStored():
                    self.held.update(event.block_hashes)
                case BlockRemoved():
                    self.held.difference_update(event.block_hashes)
                case _:
                    self.held.clear()

    def follow_until(self, last: int) -> None:
        """Apply live messages until batch ``last``; a gap, or silence before it, is filled by a replay."""
        while self.last < last:
            if not self.sub.poll(200):  # the very last messages may be the lost ones: /kv/v1/stats tells their number
                self.fill_gap()
                continue
            seq, payload = self.receive()
            if seq > self.last + 1:
                self.fill_gap()
            if seq > self.last:
                self.apply(seq, payload)

    def fill_gap(self) -> None:
        self.gaps += 1
        for missed in self.replay(self.last + 1):
            self.apply(*missed)


def subscribed(client: Client, publisher: EventPublisher) -> None:
    """Publish until a live message arrives (a subscription takes a moment to reach the PUB); read all of it."""
    deadline = time.monotonic() + WITHIN_MS / 1000
    while not client.sub.poll(20):
        assert time.monotonic() < deadline, "the subscription never took effect"
        publisher.log.stored(name(0), parent=None)
    publisher.log.removed(name(_MARKER))
    while True:
        client.last, payload = client.receive()
        client.held = {name(0)}
        events = decode_batch(payload).batch.events
        assert events
        if any(isinstance(event, BlockRemoved) and name(_MARKER) in event.block_hashes for event in events):
            return


def ask(control: zmq.Socket[bytes], operation: bytes) -> list[object]:
    control.send_multipart((b"", b"id-1", operation, b""))
    assert control.poll(WITHIN_MS), "no answer from the control socket"
    empty, request_id, status, body = control.recv_multipart()
    assert (empty, request_id) == (b"", b"id-1")
    assert status == OK, body
    return msgspec.json.decode(body, type=list[object])


def test_a_subscriber_hears_of_blocks_within_milliseconds(tmp_path: Path, sockets: Sockets) -> None:
    with publishing(tmp_path) as publisher:
        client = Client(sockets, publisher)
        subscribed(client, publisher)
        publisher.log.stored(name(1), parent=None)
        client.apply(*client.receive())
        assert client.held == {name(0), name(1)}


def test_a_late_subscriber_replays_the_gap(tmp_path: Path, sockets: Sockets) -> None:
    with publishing(tmp_path) as publisher:
        control = sockets.connect(zmq.DEALER, f"ipc://{tmp_path}/control")
        for number in range(50):
            publisher.log.stored(name(number), parent=None)
            ask(control, b"resident")
        client = Client(sockets, publisher)
        late = client.replay(0)
        assert [seq for seq, _ in late] == list(range(50))
        for seq, payload in late:
            client.apply(seq, payload)
        assert client.held == {name(number) for number in range(50)}
        assert client.replay(48) == late[48:]
        assert client.replay(50) == []


def test_an_expired_replay_begins_where_the_ring_begins(tmp_path: Path, sockets: Sockets) -> None:
    with publishing(tmp_path, ring=5) as publisher:
        control = sockets.connect(zmq.DEALER, f"ipc://{tmp_path}/control")
        for number in range(20):
            publisher.log.stored(name(number), parent=None)
            ask(control, b"resident")
        client = Client(sockets, publisher)
        assert [seq for seq, _ in client.replay(3)] == [15, 16, 17, 18, 19]


def test_a_malformed_replay_request_is_answered_as_empty(tmp_path: Path, sockets: Sockets) -> None:
    with publishing(tmp_path) as publisher:
        client = Client(sockets, publisher)
        client.dealer.send_multipart((b"", b"three"))
        assert client.dealer.poll(WITHIN_MS)
        assert client.dealer.recv_multipart() == [b"", END_OF_REPLAY, b""]
        client.dealer.send_multipart((b"no", b"such", b"frames"))
        assert client.replay(0) == []


def test_a_slow_subscriber_finds_a_gap_and_recovers_while_the_engine_never_waits(
    tmp_path: Path, sockets: Sockets
) -> None:
    with publishing(tmp_path, hwm=5) as publisher:
        control = sockets.connect(zmq.DEALER, f"ipc://{tmp_path}/control")
        slow = Client(sockets, publisher, hwm=5)
        subscribed(slow, publisher)
        for burst in range(1, 301):
            blocks = [name(burst * 1_000 + number) for number in range(1_000)]
            for block in blocks:
                publisher.log.stored(block, parent=None)
            for block in blocks[1:]:
                publisher.log.removed(block)
            [last] = ask(control, b"end")  # ends the batch
        slow.follow_until(int(str(last)))
        assert slow.gaps > 0
        assert {block.hex() for block in slow.held} == set(map(str, ask(control, b"resident")[1:]))


def test_a_snapshot_equals_the_batches_up_to_its_number_while_publishing_goes_on(
    tmp_path: Path, sockets: Sockets
) -> None:
    with publishing(tmp_path) as publisher:
        stop = threading.Event()

        def churn() -> None:
            number = 0
            while not stop.is_set():
                publisher.log.stored(name(number), parent=name(number - 1) if number % 7 else None)
                if number % 3 == 0:
                    publisher.log.removed(name(number // 2))
                number += 1
                if number % 200 == 0:
                    time.sleep(0.001)

        engine = threading.Thread(target=churn)
        engine.start()
        try:
            control = sockets.connect(zmq.DEALER, f"ipc://{tmp_path}/control")
            snapshots = [ask(control, b"resident") for _ in range(20)]
        finally:
            stop.set()
            engine.join()
        client = Client(sockets, publisher)
        batches = dict(client.replay(0))
        for seq, *blocks in snapshots:
            assert isinstance(seq, int)
            while client.last < seq:
                client.apply(Seq(client.last + 1), batches[Seq(client.last + 1)])
            assert {block.hex() for block in client.held} == set(blocks)
            assert len(set(blocks)) == len(blocks)
        assert publisher.log.counters().dropped == 0


def test_an_operation_that_fails_is_an_error_answer_and_the_next_one_works(tmp_path: Path, sockets: Sockets) -> None:
    with publishing(tmp_path) as publisher:
        control = sockets.connect(zmq.DEALER, f"ipc://{tmp_path}/control")
        for operation, why in ((b"fails", b"RuntimeError: the cache is on fire"), (b"dance", b"unknown operation")):
            control.send_multipart((b"", b"7", operation, b""))
            assert control.poll(WITHIN_MS)
            _, request_id, status, body = control.recv_multipart()
            assert (request_id, status) == (b"7", ERROR)
            assert why in body
        assert ask(control, b"resident") == [-1]
        assert publisher.errors == 0


def test_an_operation_gets_the_body_and_may_refuse_it(tmp_path: Path, sockets: Sockets) -> None:
    with publishing(tmp_path) as publisher:
        control = sockets.connect(zmq.DEALER, f"ipc://{tmp_path}/control")
        for body, answer in ((b"{}", [OK, b"{}"]), (b"", [REFUSED, b"the body is empty; anything else is allowed"])):
            control.send_multipart((b"", b"7", b"echo", body))
            assert control.poll(WITHIN_MS)
            assert control.recv_multipart()[2:] == answer
        assert publisher.errors == 0


def test_an_endpoint_in_use_is_named(tmp_path: Path) -> None:
    with publishing(tmp_path) as publisher:
        taken = publisher.endpoint
        with pytest.raises(EndpointError, match=f"can't bind {taken}: Address already in use"):
            EventPublisher(make_log, endpoints=Endpoints(events=taken, replay=ANY))


def test_closing_publishes_what_waits_and_leaves_no_thread(tmp_path: Path, sockets: Sockets) -> None:
    threads = set(threading.enumerate())
    with publishing(tmp_path) as publisher:
        client = Client(sockets, publisher)
        subscribed(client, publisher)
        publisher.log.stored(name(9), parent=None)
    publisher.close()
    assert set(threading.enumerate()) <= threads
    assert publisher.log.publish() == []
    publisher.log.removed(name(9))  # an engine that still runs on is not hurt
