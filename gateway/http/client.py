"""The HTTP client for the gateway's own calls: health checks, control, snapshots, discovery.

It is httpx2, over the connections of ``gateway.http.connection_pool`` where many calls go to the same servers. Requests
of clients use these connections without it.
"""

from collections.abc import Mapping
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Final

import httpx2


class AnswerTooLargeError(Exception):
    """An answer is longer than its limit."""


FETCH_ERRORS: Final = (httpx2.HTTPError, AnswerTooLargeError, OSError)
"""What ``fetch`` raises where there is no whole answer; a limit of time around it raises ``TimeoutError`` beside."""


def make_client(
    transport: httpx2.AsyncBaseTransport, *, connect_s: float, headers: Mapping[str, str] | None = None
) -> httpx2.AsyncClient:
    """Return a client without a limit on connections or total time; close it at the end.

    ``headers`` go with every request. Cookies, redirects and the environment's proxies are ignored.
    """
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
