"""The HTTP client for what is no request of a client: health checks, control calls, snapshots, discovery.

Requests of clients go through ``gateway.upstream``, whose connections cost a tenth of the processor time.
"""

import ssl
from collections.abc import Iterable, Mapping
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from typing import Any, Final

import httpcore2
import httpx2

from gateway.http.resolver import Resolver

_IDLE_S: Final = 4.0
"""uvicorn's servers close idle connections after 5 s, and a request must not meet that."""
_LIMITS: Final = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE_S)


class AnswerTooLargeError(Exception):
    """An answer is longer than its limit."""


FETCH_ERRORS: Final = (httpx2.HTTPError, AnswerTooLargeError, OSError)
"""What ``fetch`` raises where there is no whole answer; a limit of time around it raises ``TimeoutError`` beside."""


def make_client(
    *,
    connect_s: float,
    resolver: Resolver | None = None,
    unix_socket: Path | None = None,
    headers: Mapping[str, str] | None = None,
) -> httpx2.AsyncClient:
    """Return a client without a limit on connections or total time; close it at the end.

    ``resolver`` looks up the host of each new connection instead of the system. With ``unix_socket`` every request goes
    there, without TLS. ``headers`` go with every request. Cookies, redirects and the environment's proxies are ignored.
    """
    if unix_socket is not None:
        unused = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # to load certificates would take some 50 ms
        transport = httpx2.AsyncHTTPTransport(uds=str(unix_socket), verify=unused, trust_env=False, limits=_LIMITS)
    elif resolver is None:
        transport = httpx2.AsyncHTTPTransport(trust_env=False, limits=_LIMITS)
    else:
        transport = _ResolvingTransport(resolver)
    return httpx2.AsyncClient(
        transport=transport,
        trust_env=False,
        timeout=httpx2.Timeout(None, connect=connect_s),
        headers={"accept-encoding": "identity"} | dict(headers or {}),
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
    )


async def fetch(  # noqa: PLR0913 - a request's parts, by name
    client: httpx2.AsyncClient,
    method: str,
    url: str,
    *,
    limit_bytes: int,
    content: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, bytes]:
    """Return the status and body of an answer; the caller bounds the time.

    Raises one of ``FETCH_ERRORS``: ``AnswerTooLargeError`` for an answer beyond the limit.
    """
    async with client.stream(method, url, content=content, headers=headers) as answer:
        parts: list[bytes] = []
        size = 0
        async for part in answer.aiter_bytes():
            size += len(part)
            if size > limit_bytes:
                raise AnswerTooLargeError(f"longer than {limit_bytes} bytes")
            parts.append(part)
        return answer.status_code, b"".join(parts)


class _ResolvingTransport(httpx2.AsyncHTTPTransport):
    """httpx2 has no setting for its pool's network back end; httpcore2, which it stands on, does."""

    def __init__(self, resolver: Resolver) -> None:
        context = ssl.create_default_context()
        super().__init__(verify=context, trust_env=False)
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=context,
            max_connections=None,
            max_keepalive_connections=None,
            keepalive_expiry=_IDLE_S,
            network_backend=_ResolvingBackend(resolver),
        )


class _ResolvingBackend(httpcore2.AnyIOBackend):
    """Connects to the addresses that ``resolver`` returns, one after the other."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore2's interface
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        try:
            addresses = await self._resolver.resolve(host, port)
        except OSError as error:
            raise httpcore2.ConnectError(str(error)) from error
        refused: Exception = httpcore2.ConnectError(f"{host} has no address")
        for each in addresses:
            try:
                return await super().connect_tcp(each.host, port, timeout, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                refused = error
        raise refused


__all__ = ["FETCH_ERRORS", "AnswerTooLargeError", "fetch", "make_client"]
