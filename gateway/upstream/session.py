"""The HTTP session for what is no request of a client: health checks, control, snapshots."""

from collections.abc import Mapping

import aiohttp
from aiohttp.abc import AbstractResolver

from gateway.upstream.timeouts import Timeouts


def make_session(
    timeouts: Timeouts, resolver: AbstractResolver | None = None, headers: Mapping[str, str] | None = None
) -> aiohttp.ClientSession:
    """Return a session without a limit on connections or total time; close it at the end. ``resolver`` looks names up
    instead of the system's own; ``headers`` go with every request.

    Idle connections are dropped after 4 s: uvicorn's servers close theirs after 5 s, and a request must not meet that.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0, ttl_dns_cache=30, resolver=resolver),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_s, connect=None, sock_read=None),
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        read_bufsize=1 << 18,
    )


__all__ = ["make_session"]
