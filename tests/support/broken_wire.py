"""A TCP relay that breaks what the server says, from a given byte on."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

_PIECE: Final = 1 << 16
_LIMIT_S: Final = 120.0


class Fault(StrEnum):
    """What happens at the byte."""

    FLIP = "flip"
    CUT = "cut"
    STALL = "stall"


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """At the byte ``at`` of what the server says, counted from the connection's first."""

    fault: Fault
    at: int


@contextmanager
def broken_wire(host: str, port: int, how: Break) -> Iterator[int]:
    """Relay to ``host:port``, and yield the port to connect to."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            with suppress(OSError):  # the server socket was closed: it is over
                while True:
                    client, _ = listening.accept()
                    threading.Thread(target=_relay, args=(client, (host, port), how, over), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield listening.getsockname()[1]
        finally:
            over.set()
            listening.shutdown(socket.SHUT_RDWR)


def _relay(client: socket.socket, to: tuple[str, int], how: Break, over: threading.Event) -> None:
    with client, socket.create_connection(to, timeout=_LIMIT_S) as server, suppress(OSError):
        client.settimeout(_LIMIT_S)
        up = threading.Thread(target=_pump, args=(client, server), daemon=True)
        up.start()
        said = 0
        while piece := bytearray(server.recv(_PIECE)):
            here = how.at - said
            said += len(piece)
            if 0 <= here < len(piece):
                if how.fault is Fault.FLIP:
                    piece[here] ^= 1
                else:
                    client.sendall(piece[:here])
                    if how.fault is Fault.STALL:
                        over.wait(_LIMIT_S)
                    break
            client.sendall(piece)
        client.shutdown(socket.SHUT_RDWR)  # closing alone would leave it open as long as the other thread reads


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):  # either side has gone
        while piece := source.recv(_PIECE):
            sink.sendall(piece)
        sink.shutdown(socket.SHUT_WR)


__all__ = ["Break", "Fault", "broken_wire"]
