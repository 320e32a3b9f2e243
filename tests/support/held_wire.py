"""A TCP relay that keeps back what a server sends, from a given byte on, until a test lets it go."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_CHUNK_BYTES = 1 << 16
_LIMIT_S = 120.0


class HeldWire:
    """Relays connections to ``to``; ``hold`` decides what happens to later ones."""

    def __init__(self, to: tuple[str, int]) -> None:
        self.port = 0
        self._to = to
        self._at: int | None = None
        self._held = threading.Event()
        self._open = threading.Event()

    def hold(self, at: int | None) -> None:
        """Keep back what the server sends from byte ``at`` on in each later connection; None: nothing."""
        self._at = at
        self._held.clear()
        self._open.clear()

    @property
    def is_holding(self) -> bool:
        """Whether a connection has come to that byte."""
        return self._held.is_set()

    def release(self) -> None:
        """Pass on what was kept back, and all that follows."""
        self._open.set()

    def accept(self, listening: socket.socket) -> None:
        with suppress(OSError):  # the server socket was closed: it is over
            while True:
                client, _ = listening.accept()
                threading.Thread(target=self._relay, args=(client, self._at), daemon=True).start()

    def _relay(self, client: socket.socket, at: int | None) -> None:
        with client, suppress(OSError), socket.create_connection(self._to, timeout=_LIMIT_S) as server:
            client.settimeout(_LIMIT_S)
            up = threading.Thread(target=_pump, args=(client, server), daemon=True)
            up.start()
            passed = 0
            while chunk := server.recv(_CHUNK_BYTES):
                if at is not None and passed + len(chunk) > at:
                    client.sendall(chunk[: max(0, at - passed)])
                    chunk = chunk[max(0, at - passed) :]
                    passed, at = at, None
                    self._held.set()
                    self._open.wait(_LIMIT_S)
                passed += len(chunk)
                client.sendall(chunk)
            client.shutdown(socket.SHUT_RDWR)
            up.join(_LIMIT_S)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):  # either side has gone
        while chunk := source.recv(_CHUNK_BYTES):
            sink.sendall(chunk)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)


@contextmanager
def held_wire(host: str, port: int) -> Iterator[HeldWire]:
    """Run a relay to ``host:port`` until the block ends."""
    wire = HeldWire((host, port))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        wire.port = int(listening.getsockname()[1])
        threading.Thread(target=wire.accept, args=(listening,), daemon=True).start()
        try:
            yield wire
        finally:
            wire.release()
            listening.shutdown(socket.SHUT_RDWR)


__all__ = ["HeldWire", "held_wire"]
