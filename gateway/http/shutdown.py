"""Shutdown of the gateway: readiness first, then a grace period, then errors in each API's form.

From the stop signal on ``/readyz`` is 503, so that load balancers look elsewhere; requests are served for ``notice_s``,
each connection to the end of its answer. Then the address is given up: a connection is served or refused, and whoever
is refused can go elsewhere, as its request was sent to nobody. After the grace period each request that still runs ends
as one ends whose time is over: a stream with the error event of its dialect, a whole answer with an envelope. What
doesn't end by that is cancelled.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from time import monotonic
from typing import Final

import uvicorn

from gateway.errors import ShuttingDownError
from gateway.http.deadline import Deadline
from gateway.http.listener import take_no_more
from gateway.http.protocol import CLOSE, BoundedProtocol

_POLL_S: Final = 0.05
_LAST_CONNECTIONS_S: Final = 2.0
_LAST_REQUESTS_S: Final = 2.0
_LAST_WORDS_S: Final = 2.0
"""For requests to say how they end, and for those that are cancelled to be gone."""

_log = logging.getLogger(__name__)


class Shutdown:
    """Whether the gateway is ending, and the requests that it has to end then."""

    def __init__(self) -> None:
        self.begun = False
        self._over = False
        self._running: set[Deadline] = set()

    def begin(self) -> None:
        """Begin the shutdown. Idempotent."""
        self.begun = True

    def enter(self, deadline: Deadline) -> None:
        """Note that a request runs; raises ``ShuttingDownError`` once those that run are ended."""
        if self._over:
            raise ShuttingDownError
        self._running.add(deadline)

    def leave(self, deadline: Deadline) -> None:
        """Note that it has ended. Idempotent."""
        self._running.discard(deadline)

    def end_all(self) -> int:
        """End the requests that run, and return how many those are; no more are taken."""
        self._over = True
        for each in self._running:
            each.cut(ShuttingDownError())
        return len(self._running)


class GracefulServer(uvicorn.Server):
    """uvicorn's server, but for its end. A second SIGINT ends the grace period."""

    def __init__(
        self, config: uvicorn.Config, shutdown: Shutdown, *, notice_s: float, grace_s: float, alone: bool = True
    ) -> None:
        """``alone``: no other process listens on the same address."""
        super().__init__(config)
        self._alone = alone
        self._notice_s = notice_s
        self._shutdown = shutdown
        self._grace_s = grace_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._shutdown.begin()
        await self._serve_on()
        await self._give_up_address(sockets or [])
        self._let_idle_go()
        if not await self._idle_within(self._grace_s, lambda: self.force_exit):
            _log.warning(
                "%d requests are still running after shutdown_grace_s; they are ended now", self._shutdown.end_all()
            )
            if not await self._idle_within(_LAST_WORDS_S):
                for task in self.server_state.tasks:
                    task.cancel()
                await self._idle_within(_LAST_WORDS_S)
        self._let_idle_go()
        if not self.force_exit:
            await self.lifespan.shutdown()

    async def _serve_on(self) -> None:
        """Serve for the time of notice; every answer is the last one of its connection."""
        self.server_state.default_headers = [*self.server_state.default_headers, CLOSE]
        ends_s = monotonic() + self._notice_s
        while monotonic() < ends_s and not self.force_exit:
            for connection in list(self.server_state.connections):
                if isinstance(connection, BoundedProtocol):
                    connection.close_after_answer()
            await asyncio.sleep(_POLL_S)

    async def _give_up_address(self, sockets: list[socket.socket]) -> None:
        """Accept what waits, then close; connections that came last have a moment to send their requests.

        An address that other workers listen on as well stays theirs.
        """
        own = [each for each in sockets if self._alone]
        await asyncio.gather(*(asyncio.to_thread(take_no_more, each, limit_s=_LAST_CONNECTIONS_S) for each in own))
        for server in self.servers:
            server.close()
        for each in sockets:
            each.close()
        ends_s = monotonic() + _LAST_REQUESTS_S
        while any(isinstance(each, BoundedProtocol) and each.fresh for each in self.server_state.connections):
            if monotonic() >= ends_s:
                return
            await asyncio.sleep(_POLL_S)

    def _let_idle_go(self) -> None:
        """Close connections without a request, and those of the others with their answers."""
        for connection in list(self.server_state.connections):
            connection.shutdown()

    async def _idle_within(self, seconds: float, enough: Callable[[], bool] = lambda: False) -> bool:
        """Return whether no request runs any more, as soon as that is so, and at the latest after so long."""
        ends_s = monotonic() + seconds
        while self.server_state.tasks:
            if monotonic() >= ends_s or enough():
                return False
            await asyncio.sleep(_POLL_S)
        return True
