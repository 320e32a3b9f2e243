"""Which addresses the gateway may talk to because somebody *told* it to, not because its settings say so.

Whoever may register an instance makes the gateway send requests to an address of their choice, from inside the network.
So a registered URL is an origin alone (no path, no credentials), all addresses of its host must lie in allowed
networks, and they are checked once more at each connection (``gateway.upstream.resolver``): a name may point elsewhere
by then. Redirects are never followed. Link-local addresses, where clouds keep their credentials, are refused in any
case, also written as IPv6 or as an odd number; so are those others where some clouds keep them, two of which lie in a
private network.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from gateway.http.endpoint import DEFAULT_PORTS, IPAddress, address_of
from gateway.settings.fleet import PRIVATE_NETWORKS, SCHEMES

IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

_RESOLVE_TIMEOUT_S = 5.0
_MAX_URL_CHARS = 512
_NAT64 = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48"))
_CREDENTIALS = tuple(
    ipaddress.ip_network(each)
    for each in (
        "fd00:ec2::/32",  # AWS
        "fd20:ce::254/128",  # Google
        "100.100.100.200/32",  # Alibaba
        "168.63.129.16/32",  # Azure
        "192.0.0.192/32",  # Oracle
    )
)
"""Metadata services of clouds that are not link-local."""


class AddressError(ValueError):
    """An address that may not be used; the message says why and what is allowed."""


@dataclass(frozen=True, slots=True)
class AddressRules:
    """Schemes and networks that registered instances may be in."""

    schemes: frozenset[str] = frozenset(SCHEMES)
    networks: tuple[IPNetwork, ...] = tuple(ipaddress.ip_network(each) for each in PRIVATE_NETWORKS)

    @classmethod
    def of(cls, schemes: Iterable[str], networks: Iterable[str]) -> "AddressRules":
        return cls(frozenset(schemes), tuple(ipaddress.ip_network(each) for each in networks))

    def origin(self, url: str) -> str:
        """Return an instance's URL as an origin in its usual spelling; raises ``AddressError``. A host that is an
        address is checked, too.
        """
        if len(url) > _MAX_URL_CHARS or any(not "!" <= letter <= "~" for letter in url) or "\\" in url:
            raise AddressError(f"an instance url has at most {_MAX_URL_CHARS} printable ASCII characters")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise AddressError(f"the url can't be read: {error}") from None
        scheme, host = parts.scheme.lower(), parts.hostname
        if scheme not in self.schemes:
            raise AddressError(f"the scheme {scheme!r} is not allowed; allowed are {', '.join(sorted(self.schemes))}")
        if not host or parts.username is not None or parts.password is not None:
            raise AddressError("an instance url names a host and no user, like http://10.0.0.7:9001")
        if parts.path not in {"", "/"} or "?" in url or "#" in url:
            raise AddressError("an instance url is an origin without a path, a query or a fragment")
        if port == 0:
            raise AddressError("an instance's port is from 1 to 65535")
        if (literal := _literal(host)) is not None:
            self.check(literal)
            host = str(literal)
        shown = f"[{host}]" if ":" in host else host
        return f"{scheme}://{shown}" + ("" if port in {None, DEFAULT_PORTS[scheme]} else f":{port}")

    def check(self, address: IPAddress) -> None:
        """Raise ``AddressError`` unless requests may go to this address."""
        plain = _plain(address)
        if plain.is_link_local or plain.is_multicast or plain.is_unspecified:
            raise AddressError(f"the address {address} is never an instance's (link-local, multicast or unspecified)")
        if any(plain in network for network in _CREDENTIALS if network.version == plain.version):
            raise AddressError(f"the address {address} is never an instance's (a cloud's metadata service)")
        if not any(plain in network for network in self.networks if network.version == plain.version):
            allowed = ", ".join(map(str, self.networks)) or "none"
            raise AddressError(f"the address {address} is outside the allowed networks ({allowed})")

    async def vetted(self, url: str) -> str:
        """Return ``origin(url)`` once all addresses of its host have been looked up and checked."""
        origin = self.origin(url)
        host = urlsplit(origin).hostname or ""
        if _literal(host) is not None:
            return origin
        try:
            async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
                found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError, UnicodeError) as error:
            raise AddressError(f"the host {host!r} can't be looked up: {error or 'it took too long'}") from None
        for *_, address in found:
            self.check(ipaddress.ip_address(str(address[0]).partition("%")[0]))
        return origin


def _literal(host: str) -> IPAddress | None:
    try:
        return address_of(host)
    except ValueError as error:
        raise AddressError(str(error)) from None


def _plain(address: IPAddress) -> IPAddress:
    """The IPv4 address that an IPv6 one stands for (mapped, 6to4, Teredo, NAT64), or itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if any(address in network for network in _NAT64):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address
