"""The TCP door of a prefill instance: whoever shows a ticket gets the blocks that are held under it, once.

Its threads only send bytes; what is held, and whether it still is, they ask the engine's own thread. A connection
costs one of ``MAX_CONNECTIONS`` places, and no more than ``timeout_s``.
"""

import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Protocol

from engines.lmdeploy.pd_peers import Peers
from engines.lmdeploy.pd_wire import (
    GO,
    RELEASED,
    TAKEN,
    Connection,
    Offer,
    TransferError,
    answer,
    expect,
    read_ticket,
    send_frames,
)
from kvcontrol.core.pd import Ticket

MAX_CONNECTIONS = 32
_ACCEPT_POLL_S = 0.5
_JOIN_S = 5.0

_log = logging.getLogger("lmdeploy.kvgate")


class Larder(Protocol):
    """What is held, as the server's threads see it; every call is bounded in time."""

    def begin(self, ticket: Ticket) -> Offer:
        """Describe what is held and keep it until ``end``; raises ``TransferError``."""

    def pieces(self, offer: Offer) -> Iterator[memoryview]:
        """Give the bytes of its blocks."""

    def still(self, ticket: Ticket) -> bool:
        """Whether the bytes that were given are what the ticket stands for."""

    def end(self, ticket: Ticket, *, taken: bool) -> None:
        """End a reading that ``begin`` began."""


class PdServer:
    """Serves from ``start`` to ``close``; raises ``OSError`` when it can't listen."""

    def __init__(self, larder: Larder, peers: Peers, *, host: str, port: int, timeout_s: float) -> None:
        self._larder = larder
        self._peers = peers
        self._timeout_s = timeout_s
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._closing = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        self._socket.settimeout(_ACCEPT_POLL_S)
        self._thread = threading.Thread(target=self._accept, name="kvgate-pd", daemon=True)

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Take no more connections; those that are open end by themselves. Idempotent."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        self._socket.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, address = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:
                if not self._closing.is_set():
                    _log.exception("held prompts are not served any more")
                return
            if not self._peers.admits(str(address[0])):
                _log.warning("a connection from %s was refused: it is not in the list of peers", address[0])
                sock.close()
            elif not self._places.acquire(blocking=False):
                _log.warning("a connection from %s was refused: %d are open", address[0], MAX_CONNECTIONS)
                sock.close()
            else:
                threading.Thread(target=self._serve, args=(sock,), name="kvgate-pd-peer", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with Connection(sock, deadline_s=time.monotonic() + self._timeout_s) as connection:
                self._hand_over(connection)
        except TransferError as error:
            _log.warning("a held prompt was not handed over: %s", error)
        except Exception:  # noqa: BLE001  # a thread's failure would be nobody's
            _log.exception("a held prompt was not handed over")
        finally:
            self._places.release()

    def _hand_over(self, connection: Connection) -> None:
        ticket = read_ticket(connection)
        try:
            offer = self._larder.begin(ticket)
        except TransferError as error:
            answer(connection, error)
            return
        taken = False
        try:
            answer(connection, offer)
            expect(connection, GO)
            send_frames(connection, self._while_held(offer, ticket))
            expect(connection, TAKEN)
            taken = True
        finally:
            self._larder.end(ticket, taken=taken)
        connection.send(RELEASED)

    def _while_held(self, offer: Offer, ticket: Ticket) -> Iterator[memoryview]:
        """Give the pieces, and fail instead of ending when their blocks were taken away meanwhile."""
        yield from self._larder.pieces(offer)
        if not self._larder.still(ticket):
            raise TransferError("refused", "the prompt was given up while it was read")


__all__ = ["MAX_CONNECTIONS", "Larder", "PdServer"]
