"""Where an instance's URL leads, in one spelling: two that lead to the same place are the same instance."""

import ipaddress
import re
import socket
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import urlsplit

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_LOCALHOST: Final = "localhost"
_LOOPBACK: Final = "127.0.0.1"
_NUMBER: Final = re.compile(r"(?:.*\.)?(?:[0-9]+|0[xX][0-9a-fA-F]*)")


class Endpoint(NamedTuple):
    """A host (an address in its usual spelling), its port, and the prefix of its API's paths."""

    host: str
    port: int
    path: str


def address_of(host: str) -> IPAddress | None:
    """Return the address that a URL's host is, however it is written (``127.1``, ``0x7f000001``, ``::ffff:7f00:1``);
    None where it is a name. Raises ``ValueError`` for one that looks like an IP address but is invalid: no name does.
    """
    plain = host.removesuffix(".")
    try:
        found = ipaddress.ip_address(plain)
    except ValueError:
        if not _NUMBER.fullmatch(plain):
            return None
        try:
            return ipaddress.IPv4Address(socket.inet_aton(plain))
        except OSError:
            raise ValueError(f"the host {host!r} looks like an IP address but is invalid") from None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


@lru_cache(maxsize=4096)
def endpoint_of(url: str) -> Endpoint:
    """Return where a URL leads; raises ``ValueError`` for one that can't be read.

    A name is taken for itself, whatever it points to, but for ``localhost``.
    """
    parts = urlsplit(url)
    host = (parts.hostname or "").removesuffix(".")
    if host == _LOCALHOST or host.endswith(f".{_LOCALHOST}"):
        host = _LOOPBACK
    address = address_of(host)
    return Endpoint(
        host=host if address is None else str(address),
        port=DEFAULT_PORTS[parts.scheme.lower()] if parts.port is None else parts.port,
        path=parts.path.rstrip("/"),
    )


def normalized_url(url: str) -> str:
    """Return a URL with its host, where that is an address, as addresses are written; raises ``ValueError``."""
    parts = urlsplit(url)
    address = address_of(parts.hostname or "")
    if address is None:
        return url
    user, at, _ = parts.netloc.rpartition("@")
    shown = f"[{address}]" if address.version == 6 else str(address)  # noqa: PLR2004 - IPv6
    port = "" if parts.port is None else f":{parts.port}"
    return parts._replace(netloc=f"{user}{at}{shown}{port}").geturl()


def serves(host: str, port: int, place: Endpoint) -> bool:
    """Whether a server that listens at ``host``, which may be all addresses of its machine, is who answers at a place:
    as far as addresses alone tell.
    """
    listening = endpoint_of(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
    if listening.port != place.port or place.path:
        return False
    address, requested = address_of(listening.host), address_of(place.host)
    everywhere = address is not None and address.is_unspecified and requested is not None and requested.is_loopback
    return everywhere or listening.host == place.host
