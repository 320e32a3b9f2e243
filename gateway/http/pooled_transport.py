"""httpx2 over connections like those of requests: its own take four times the processor time."""

import asyncio
from collections.abc import AsyncIterator
from functools import lru_cache

import httpx2

from gateway.http.connection import Connection, ConnectionLostError
from gateway.http.connection_pool import ConnectionPool, Origin
from gateway.http.headers import request_head


class PooledTransport(httpx2.AsyncBaseTransport):
    """Sends requests over the connections of ``pool``, which stays its owner's to close.

    A request has a limit of time for connecting and no other one. Nothing is sent twice: a kept connection that turns
    out to be closed is a ``RemoteProtocolError``.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._origin_of = lru_cache(maxsize=4096)(Origin.of)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Return an answer of which the head has come, and some of the body or its end.

        Raises ``httpx2.ConnectError``, ``ConnectTimeout`` or ``RemoteProtocolError``.
        """
        url = request.url
        origin = self._origin_of(f"{url.scheme}://{url.netloc.decode('ascii')}")
        body = await request.aread()
        connection = self._pool.idle(origin) or await self._connect(origin, request)
        try:
            connection.send(_head(request), body)
            await _arrival(connection)
        except BaseException:
            connection.abort()
            raise
        return httpx2.Response(
            connection.status,
            headers=connection.headers,
            stream=_Body(self._pool, origin, connection),
            request=request,
        )

    async def _connect(self, origin: Origin, request: httpx2.Request) -> Connection:
        limit_s: float | None = request.extensions.get("timeout", {}).get("connect")
        try:
            async with asyncio.timeout(limit_s):
                return await self._pool.connect(origin)
        except TimeoutError as error:
            raise httpx2.ConnectTimeout("connecting took too long", request=request) from error
        except OSError as error:
            raise httpx2.ConnectError(str(error), request=request) from error


class _Body(httpx2.AsyncByteStream):
    """The body of an answer as it comes. Closing it keeps the connection when all of the body has been read."""

    def __init__(self, pool: ConnectionPool, origin: Origin, connection: Connection) -> None:
        self._pool = pool
        self._origin = origin
        self._connection: Connection | None = connection

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (connection := self._connection) is not None:
            if data := connection.take():
                yield data
            elif connection.ended:
                return
            else:
                await _arrival(connection)

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.give_back(self._origin, connection)


async def _arrival(connection: Connection) -> None:
    try:
        await connection.arrival()
    except ConnectionLostError as error:
        raise httpx2.RemoteProtocolError(str(error)) from error


def _head(request: httpx2.Request) -> bytes:
    start = (request.method.encode("ascii"), b" ", request.url.raw_path, b" HTTP/1.1\r\n")
    try:
        return request_head(start, request.headers.raw, b"\r\n", lines=2)
    except ValueError as error:
        raise httpx2.LocalProtocolError(str(error), request=request) from None
