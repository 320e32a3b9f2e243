"""Which headers cross the gateway.

End-to-end headers do, unknown ones included. Never crossing: hop-by-hop headers (RFC 9110 section 7.6.1) and those that
``Connection`` names; ``x-kvgate-*`` from either side; towards the engine also ``Authorization`` and ``x-api-key`` (the
gateway's own), ``Accept-Encoding`` (answers are looked into, so they are asked for uncompressed) and
``Content-Encoding`` (bodies are decoded, as they are looked into, too); towards the client the engine's CORS headers
(which pages may read answers is the gateway's decision).
"""

from collections.abc import Iterable, Sequence

Header = tuple[bytes, bytes]

_OWN_PREFIX = b"x-kvgate-"
_CORS_PREFIX = b"access-control-"
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_TO_ENGINE = _HOP_BY_HOP | {
    b"accept-encoding",
    b"authorization",
    b"content-encoding",
    b"content-length",
    b"expect",
    b"host",
    b"x-api-key",
    b"x-request-id",
}
_NOT_TO_CLIENT = _HOP_BY_HOP | {b"content-length", b"date", b"server", b"x-request-id"}


def towards_engine(headers: Iterable[Header]) -> list[Header]:
    """Return a client's headers for the engine, names in lower case."""
    return _crossing(headers, _NOT_TO_ENGINE, (_OWN_PREFIX,))


def towards_client(headers: Iterable[Header]) -> list[Header]:
    """Return an engine's headers for the client, names in lower case."""
    return _crossing(headers, _NOT_TO_CLIENT, (_OWN_PREFIX, _CORS_PREFIX))


def request_head(start: Sequence[bytes], headers: Sequence[Header], end: bytes, *, lines: int) -> bytes:
    """Return a request's head: ``start``, a line for each header, and ``end``.

    ``lines`` is the number of lines of ``start`` and ``end`` together. Raises ``ValueError`` for a line break in a
    header, or one too many in ``start`` or ``end``.
    """
    parts = [*start]
    for name, value in headers:
        parts += (name, b": ", value, b"\r\n")
    parts.append(end)
    head = b"".join(parts)
    if head.count(b"\n") != len(headers) + lines:
        raise ValueError("a header with a line break in it would be two headers")
    return head


def _crossing(headers: Iterable[Header], dropped: frozenset[bytes], prefixes: tuple[bytes, ...]) -> list[Header]:
    crossing: list[Header] = []
    named: set[bytes] = set()
    for given, value in headers:
        name = given.lower()
        if name == b"connection":
            named.update(token.strip().lower() for token in value.split(b","))
        elif name not in dropped and not name.startswith(prefixes):
            crossing.append((name, value))
    if named:
        return [each for each in crossing if each[0] not in named]
    return crossing
