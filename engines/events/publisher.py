"""The publishing thread: KV events on a PUB socket, replay and control requests on two ROUTER sockets.

One thread owns the publisher's side of an ``EventLog`` and all sockets, so that numbering, replay and snapshots never
race. The engine's thread only wakes it (one byte into a pipe). A subscriber that reads too slowly loses messages at
its high-water mark, sees a gap and asks for a replay; it never slows the engine.

Frames are those of ``kvcontrol.core.wire``. Control requests are ``[b"", id, operation, body]``, answered by
``[b"", id, b"ok" | b"refused" | b"error", body]``; ``id`` is whatever the client chose.
"""

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import zmq

from engines.control.errors import RefusedError, StaleFenceError
from engines.control.operations import Operation
from engines.events.log import EventLog, Published, Resident
from kvcontrol.core.errors import WireError
from kvcontrol.core.wire import END_OF_REPLAY, decode_seq, encode_seq

TOPIC = b""
PUBLISH_HWM_BATCHES = 10_000
"""Messages that wait for one subscriber before it begins to lose them."""
OK = b"ok"
ERROR = b"error"
REFUSED = b"refused"
STALE = b"stale"
_IDLE_POLL_MS = 1_000
_GATHER_S = 0.1
_FAILURE_PAUSE_S = 0.1

_Answer = TypeVar("_Answer")

_log = logging.getLogger(__name__)


class EndpointError(RuntimeError):
    """A socket can't be bound; the message names the endpoint and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Where to bind. ``tcp://host:*`` takes any free port. ``control`` may be absent."""

    events: str
    replay: str
    control: str | None = None


PublisherOperation = Callable[["EventPublisher", bytes], bytes]
"""Answers one control request, given its body, on the publisher's thread; what it raises becomes an error answer, a
``RefusedError`` one that is the client's to mend."""


class EventPublisher:
    """Publishes an ``EventLog`` (see the module's text); ``close`` may be called twice, from any thread but its own.

    Binding happens in the constructor: ``EndpointError`` there leaves nothing open.
    """

    def __init__(
        self,
        make_log: Callable[[Callable[[], None]], EventLog],
        *,
        endpoints: Endpoints,
        operations: Mapping[bytes, PublisherOperation] | None = None,
        hwm_batches: int = PUBLISH_HWM_BATCHES,
    ) -> None:
        self._operations = dict(operations or {})
        self._errors = 0
        self._due_s: float | None = None
        """When events that wait go out, None for none that were heard of; the thread's own."""
        self._calls: deque[tuple[Callable[[], None], Callable[[], object]]] = deque()
        self._closing = threading.Event()
        self._closed = False
        self._close_lock = threading.Lock()
        self.log = make_log(self.wake)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._context = zmq.Context()
        try:
            self._pub = self._bound(zmq.PUB, endpoints.events, hwm_batches)
            # a whole replay must fit: a ROUTER drops what doesn't
            self._router = self._bound(zmq.ROUTER, endpoints.replay, self.log.replay_batches + 1_000)
            self._control = None if endpoints.control is None else self._bound(zmq.ROUTER, endpoints.control, 1_000)
        except EndpointError:
            self._context.destroy(linger=0)
            os.close(self._wake_read)
            os.close(self._wake_write)
            raise
        self.endpoint = _resolved(self._pub)
        self.replay_endpoint = _resolved(self._router)
        self._thread = threading.Thread(target=self._run, name="kvgate-events", daemon=True)

    @property
    def errors(self) -> int:
        """Failures of the publisher's own loop, each of them logged."""
        return self._errors

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Make the thread look at the log; any thread, a system call at most."""
        with self._close_lock:
            if not self._closed:
                self._write_wake()

    def call(self, work: Callable[["EventPublisher"], _Answer]) -> "Future[_Answer]":
        """Run ``work`` on the publisher's thread for a caller in this process; any thread.

        Cancelled when the publisher is closed first.
        """
        answer: Future[_Answer] = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(work(self))
            except Exception as error:  # noqa: BLE001 - belongs to the caller
                answer.set_exception(error)

        self._calls.append((run, answer.cancel))
        self.wake()
        return answer

    def snapshot(self) -> Resident:
        """Publish pending events and return the resident blocks after them; the publisher's thread only."""
        published, resident = self.log.snapshot()
        self._send(published)
        return resident

    def close(self, timeout_s: float = 5.0) -> None:
        """Publish pending events, then close sockets and thread, within ``timeout_s``."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
            self._closing.set()
            self._write_wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        while self._calls:
            self._calls.popleft()[1]()
        if self._thread.is_alive():
            _log.error("the KV event publisher did not stop within %.1f s; its sockets stay open", timeout_s)
            return
        self._context.destroy(linger=0)
        os.close(self._wake_write)
        os.close(self._wake_read)

    def _write_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full: the thread is awake already
            os.write(self._wake_write, b"\0")

    def _bound(self, kind: int, endpoint: str, hwm: int) -> Any:
        socket = self._context.socket(kind)
        socket.set_hwm(hwm)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise EndpointError(f"can't bind {endpoint}: {error}") from error
        return socket

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        if self._control is not None:
            poller.register(self._control, zmq.POLLIN)
        while True:
            closing = self._closing.is_set()  # read before the last publish: what was recorded earlier still goes out
            try:
                self._poll(poller, wait_ms=0 if closing else _IDLE_POLL_MS)
            except Exception:  # noqa: BLE001  # supervised: one bad turn must not end the stream of events
                self._errors += 1
                _log.exception("the KV event publisher failed in one round and continues")
                time.sleep(_FAILURE_PAUSE_S)
            if closing:
                return

    def _poll(self, poller: Any, *, wait_ms: int) -> None:
        ready = dict(poller.poll(wait_ms if self._due_s is None else min(wait_ms, self._gathering_ms())))
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
            if self._due_s is None:
                # The first event of a burst woke us: leave the interpreter to the engine, which has a prompt to compute
                # just now, and the blocks of one prompt go out as one chain.
                self._due_s = time.monotonic() + _GATHER_S
        requested = bool(self._calls) or self._router in ready or (self._control is not None and self._control in ready)
        if self._gathering_ms() and wait_ms and not requested:
            return
        self._due_s = None
        self._send(self.log.publish())
        while self._calls:
            self._calls.popleft()[0]()
        if self._router in ready:
            self._answer_replay(self._router.recv_multipart(zmq.NOBLOCK))
        if self._control is not None and self._control in ready:
            self._answer_control(self._control, self._control.recv_multipart(zmq.NOBLOCK))

    def _gathering_ms(self) -> int:
        """How long events of a burst are still gathered, 0 when they are due."""
        return 0 if self._due_s is None else max(0, math.ceil((self._due_s - time.monotonic()) * 1_000))

    def _send(self, batches: list[Published]) -> None:
        for batch in batches:
            self._pub.send_multipart((TOPIC, encode_seq(batch.seq), batch.payload))

    def _answer_replay(self, frames: list[bytes]) -> None:
        match frames:
            case [client, b"", request]:
                pass
            case _:
                _log.warning("a replay request of %d frames was ignored; expected [b'', first_seq]", len(frames))
                return
        try:
            first = decode_seq(request)
        except WireError as error:
            _log.warning("a replay request was answered as empty: %s", error)
        else:
            for batch in self.log.replay(first):
                self._router.send_multipart((client, b"", encode_seq(batch.seq), batch.payload))
        self._router.send_multipart((client, b"", END_OF_REPLAY, b""))

    def _answer_control(self, control: Any, frames: list[bytes]) -> None:
        match frames:
            case [client, b"", request_id, name, requested]:
                pass
            case _:
                _log.warning(
                    "a control request of %d frames was ignored; expected [b'', id, operation, body]", len(frames)
                )
                return
        operation = self._operations.get(name)
        if operation is None:
            known = ", ".join(sorted(key.decode() for key in self._operations))
            status, body = ERROR, f"unknown operation {name!r}; known are {known}".encode()
        else:
            try:
                status, body = OK, operation(self, requested)
            except StaleFenceError as error:
                status, body = STALE, str(error).encode()
            except RefusedError as error:
                status, body = REFUSED, str(error).encode()
            except Exception as error:  # noqa: BLE001  # becomes an error answer: the client must not wait in vain
                _log.exception("control operation %r failed", name)
                status, body = ERROR, f"{type(error).__name__}: {error}".encode()
        control.send_multipart((client, b"", request_id, status, body))


def without_publisher(operations: Mapping[bytes, Operation]) -> dict[bytes, PublisherOperation]:
    """Return operations that need nothing of the publisher as it calls them."""

    def taking(operation: Operation) -> PublisherOperation:
        return lambda _publisher, body: operation(body)

    return {name: taking(operation) for name, operation in operations.items()}


def _resolved(socket: Any) -> str:
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
