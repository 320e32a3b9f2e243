"""The client of control calls, as the gateway wires it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import httpx2

from gateway.http.client import make_client
from gateway.http.connection_pool import ConnectionPool
from gateway.http.pooled_transport import PooledTransport
from gateway.http.resolver import SystemResolver


@asynccontextmanager
async def control_client(*, connect_s: float = 20) -> AsyncIterator[httpx2.AsyncClient]:
    """Return a client with connections of its own, and the system's resolver."""
    with closing(ConnectionPool(SystemResolver())) as pool:
        async with make_client(PooledTransport(pool), connect_s=connect_s) as client:
            yield client
