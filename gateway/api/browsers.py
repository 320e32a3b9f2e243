"""Access of pages in browsers to this gateway: hosts, origins and preflight requests.

A browser sends what any page asks it to, also to 127.0.0.1, and lets the page read the answer only where the server
allows the page's origin (CORS). So:

- Only origins of ``cors_origins`` are allowed, on the inference routes; an engine's own CORS headers never pass.
- A body that comes with an ``Origin`` is JSON by its content type. Other types need no preflight request, so any page
  could send them.
- Where the gateway asks for no key, ``Host`` is an address or a name of this machine. A page whose own name is bound to
  127.0.0.1 (DNS rebinding) is of the same origin for the browser, and its name is what gives it away.
"""

import ipaddress
import re
import socket
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from gateway.errors import ApiError, PermissionDeniedError, UnsupportedMediaTypeError
from gateway.http.exchange import Message, Scope, Send
from gateway.http.headers import Header
from gateway.settings import ANY_ORIGIN

_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_JSON: Final = re.compile(rb"application/([a-z0-9!#$&^_.+-]+\+)?json[ \t]*(;.*)?", re.IGNORECASE)
_NAMES: Final = re.compile(rb"[A-Za-z0-9_-]+([ \t]*,[ \t]*[A-Za-z0-9_-]+)*")
_PORT: Final = re.compile(r":\d*$")
_VARY: Final = (b"vary", b"origin")


class Hosts:
    """The names of this machine in requests. Addresses are always accepted: no foreign page can have one."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = {"", "localhost", socket.gethostname().lower(), *(each.lower() for each in names)}
        self.knows = lru_cache(maxsize=1024)(self._knows)

    def _knows(self, host: bytes) -> bool:
        """Whether a ``Host`` header, with or without a port, names this machine."""
        name = _PORT.sub("", host.decode("latin-1")).lower().removesuffix(".")
        if name in self._names or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True


class Visit(NamedTuple):
    """What becomes of a request that a page may have sent: a refusal, the answer to a preflight request, or neither.

    ``headers`` are added to whatever answer it gets.
    """

    refusal: ApiError | None = None
    preflight: bool = False
    headers: tuple[Header, ...] = ()

    def sends(self, send: Send) -> Send:
        """Return what sends the answer with the headers."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *self.headers]}
            await send(message)

        return with_headers if self.headers else send


class Browsers:
    """Looks at the headers of each request. ``keyless`` returns whether requests need no key now."""

    def __init__(self, origins: Iterable[str], *, hosts: Hosts, keyless: Callable[[], bool]) -> None:
        self._origins = frozenset(each.encode() for each in origins)
        self._any = ANY_ORIGIN.encode() in self._origins
        self._hosts = hosts
        self._keyless = keyless

    def look(self, scope: Scope, *, shared: bool) -> Visit | None:
        """Return the refusal or the CORS headers for a page; None for other requests.

        ``shared`` is whether the route is one that other origins may use.
        """
        host, origin = b"", None
        for name, value in scope["headers"]:
            if name == b"host":
                host = value
            elif name == b"origin":
                origin = value
        if self._keyless() and not self._hosts.knows(host):
            return Visit(refusal=unknown_host(host))
        return None if origin is None else self._of_page(scope, origin, shared=shared)

    def _of_page(self, scope: Scope, origin: bytes, *, shared: bool) -> Visit | None:
        allowed = shared and (self._any or origin in self._origins)
        headers = dict(scope["headers"])
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers and shared:
            if not allowed:
                return Visit(refusal=_unknown_origin(origin))
            return Visit(preflight=True, headers=self._preflight(origin, headers))
        visit = Visit(headers=(*self._allowed(origin), (b"access-control-expose-headers", b"*"))) if allowed else None
        if scope["method"] not in _READING and _has_body(headers):
            given = headers.get(b"content-type")
            if given is None or not _JSON.fullmatch(given.strip()):
                return (visit or Visit())._replace(refusal=_no_json(given))
        return visit

    def _allowed(self, origin: bytes) -> tuple[Header, ...]:
        return (b"access-control-allow-origin", b"*" if self._any else origin), _VARY

    def _preflight(self, origin: bytes, headers: dict[bytes, bytes]) -> tuple[Header, ...]:
        """A listed page may send any header: what counts is the key, and it has to know that."""
        requested = headers.get(b"access-control-request-headers", b"").strip()
        return (
            *self._allowed(origin),
            (b"access-control-allow-methods", b"GET, POST"),
            *([(b"access-control-allow-headers", requested)] if _NAMES.fullmatch(requested) else []),
            (b"access-control-max-age", b"600"),
        )


def hosts_of(origins: Iterable[str]) -> set[str]:
    """Return the names of hosts in origins."""
    return {name for each in origins if (name := urlsplit(each).hostname)}


def unknown_host(host: bytes) -> ApiError:
    """Return the refusal of a request that names another host."""
    return PermissionDeniedError(
        f"this gateway is not {host.decode('latin-1')!r}: without a key it answers only by the addresses and names of "
        "its machine; set API keys, or add an origin with this name to cors_origins",
        code="host_not_allowed",
    )


def _unknown_origin(origin: bytes) -> ApiError:
    return PermissionDeniedError(
        f"pages of {origin.decode('latin-1')!r} may not use this gateway: add this origin to cors_origins",
        code="origin_not_allowed",
    )


def _no_json(given: bytes | None) -> ApiError:
    named = "no content type" if given is None else f"content type {given.decode('latin-1')!r}"
    return UnsupportedMediaTypeError(
        f"a request with an Origin header has {named}; a page sends its body as application/json"
    )


def _has_body(headers: dict[bytes, bytes]) -> bool:
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0").strip() != b"0"
