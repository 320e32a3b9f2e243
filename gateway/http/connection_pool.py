"""Connections to instances: opened when needed, kept while they may be needed again.

Of idle ones the latest is used first, so that those beyond need grow old and are closed. A host's name is looked up
under the rules (``resolver``), for each new connection but at most every half minute; an address is used as it is,
having been checked when its instance was named.
"""

import asyncio
import base64
import socket
import ssl
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from urllib.parse import unquote, urlsplit

from aiohappyeyeballs import start_connection

from gateway.http.connection import Connection
from gateway.http.endpoint import DEFAULT_PORTS, address_of
from gateway.http.resolver import Address, Resolver

_IDLE_S = 4.0
"""uvicorn's servers close idle connections after 5 s, and a request must not meet that."""
_NAMES_S = 30.0
_NEXT_ADDRESS_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where an instance's server is. ``head`` is what each request's header begins with, up to its own path, and
    ``host`` the lines that follow.
    """

    name: str
    port: int
    tls: bool
    head: bytes
    host: bytes

    @classmethod
    def of(cls, url: str) -> "Origin":
        """Return the origin of an instance's URL, which has a scheme and a host."""
        parts = urlsplit(url)
        name = parts.hostname or ""
        port = parts.port or DEFAULT_PORTS[parts.scheme]
        shown = f"[{name}]" if ":" in name else name
        if port != DEFAULT_PORTS[parts.scheme]:
            shown += f":{port}"
        lines = f"host: {shown}\r\n"
        if parts.username is not None:
            credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            lines += f"authorization: Basic {base64.b64encode(credentials.encode()).decode()}\r\n"
        return cls(
            name=name,
            port=port,
            tls=parts.scheme == "https",
            head=b"POST " + parts.path.rstrip("/").encode(),
            host=b" HTTP/1.1\r\n" + lines.encode(),
        )


class ConnectionPool:
    """Owns connections to instances. Without a bound on their number: admission bounds what is sent."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self._idle: dict[Origin, deque[Connection]] = {}
        self._names: dict[tuple[str, int], tuple[float, Sequence[Address]]] = {}
        self._tls: ssl.SSLContext | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    def idle(self, origin: Origin) -> Connection | None:
        """Return an open connection on which nothing is asked, None when there is none."""
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if connection.reusable:
                if monotonic() - connection.idle_since_s < _IDLE_S:
                    return connection
                connection.abort()
        return None

    async def connect(self, origin: Origin) -> Connection:
        """Return a new connection; raises ``OSError``. Whoever calls bounds the wait."""
        loop = asyncio.get_running_loop()
        infos = [
            (each.family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", each.sockaddr)
            for each in await self._addresses(origin)
        ]
        try:
            found = await start_connection(infos, happy_eyeballs_delay=_NEXT_ADDRESS_S, interleave=1)
        except OSError:
            self._names.pop((origin.name, origin.port), None)  # the host may have moved
            raise
        try:
            if not origin.tls:
                return (await loop.create_connection(Connection, sock=found))[1]
            if self._tls is None:
                self._tls = ssl.create_default_context()
            return (await loop.create_connection(Connection, sock=found, ssl=self._tls, server_hostname=origin.name))[1]
        except BaseException:
            found.close()
            raise

    def give_back(self, origin: Origin, connection: Connection) -> None:
        """Keep a connection for the next request if it can be used for one, close it otherwise."""
        if self._closed or not connection.reusable:
            connection.abort()
            return
        idle = self._idle.get(origin)
        if idle is None:
            idle = self._idle[origin] = deque()
        idle.append(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(_IDLE_S, self._close_old)

    def close(self) -> None:
        """Close all that is idle, and whatever is given back from now on."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for idle in self._idle.values():
            for connection in idle:
                connection.abort()
        self._idle.clear()

    async def _addresses(self, origin: Origin) -> Sequence[Address]:
        if (literal := address_of(origin.name)) is not None:
            if literal.version == 6:  # noqa: PLR2004 - IPv6
                return [Address(family=socket.AF_INET6, sockaddr=(str(literal), origin.port, 0, 0))]
            return [Address(family=socket.AF_INET, sockaddr=(str(literal), origin.port))]
        known = self._names.get((origin.name, origin.port))
        if known is not None and monotonic() < known[0]:
            return known[1]
        found = await self._resolver.resolve(origin.name, origin.port)
        if not found:
            raise OSError(None, f"{origin.name} has no address")
        self._names[origin.name, origin.port] = (monotonic() + _NAMES_S, found)
        return found

    def _close_old(self) -> None:
        self._sweep = None
        now_s = monotonic()
        for origin, idle in tuple(self._idle.items()):
            while idle and (now_s - idle[0].idle_since_s >= _IDLE_S or not idle[0].reusable):
                idle.popleft().abort()
            if not idle:
                del self._idle[origin]
        if self._idle:
            self._sweep = asyncio.get_running_loop().call_later(_IDLE_S, self._close_old)
