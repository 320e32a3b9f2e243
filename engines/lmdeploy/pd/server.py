"""The TCP server of an instance that hands KV blocks over; the owner handles each connection.

Its threads only send bytes; what is there, and whether it still is, they ask the engine's own thread. A connection
costs one of ``MAX_CONNECTIONS`` places, and no more than ``timeout_s``.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from engines.lmdeploy.pd.peers import Peers
from engines.lmdeploy.pd.wire import Connection, TransferError

MAX_CONNECTIONS = 32
_ACCEPT_POLL_S = 0.5
_JOIN_S = 5.0

_log = logging.getLogger("lmdeploy.kvgate")


class PdServer:
    """Has ``serve`` speak with each peer, on a thread of its own, from ``start`` to ``close``; raises ``OSError`` when
    it can't listen.
    """

    def __init__(
        self, serve: Callable[[Connection], None], peers: Peers, *, host: str, port: int, timeout_s: float
    ) -> None:
        self._speak = serve
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
        """Accept no more connections; open ones end by themselves. Idempotent."""
        self._closing.set()
        with suppress(OSError):  # it wakes who waits in accept
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        self._socket.close()

    def _accept(self) -> None:
        failures = 0
        while not self._closing.is_set():
            try:
                sock, address = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:  # too many files are open, or a peer left at the door: it passes
                failures += not self._closing.is_set()
                if failures and failures & (failures - 1) == 0:  # 1st, 2nd, 4th, 8th...: a log, not a flood
                    _log.warning("a connection could not be accepted (%d times by now): %s", failures, error)
                self._closing.wait(_ACCEPT_POLL_S)
                continue
            if not self._peers.admits(str(address[0])):
                _log.warning("a connection from %s was refused: it is not in the list of peers", address[0])
                sock.close()
            elif not self._places.acquire(blocking=False):
                _log.warning("a connection from %s was refused: %d are open", address[0], MAX_CONNECTIONS)
                sock.close()
            else:
                self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        try:
            threading.Thread(target=self._serve, args=(sock,), name="kvgate-pd-peer", daemon=True).start()
        except RuntimeError as error:  # the system has no thread for it now
            _log.warning("a connection was refused: %s", error)
            self._places.release()
            sock.close()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with Connection(sock, deadline_s=time.monotonic() + self._timeout_s) as connection:
                self._speak(connection)
        except TransferError as error:
            _log.warning("a prompt was not handed over: %s", error)
        except Exception:  # noqa: BLE001  # a thread's failure would be nobody's
            _log.exception("a prompt was not handed over")
        finally:
            self._places.release()
