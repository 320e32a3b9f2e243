"""Names of hosts to addresses."""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """An address of a host; ``sockaddr`` has the form of the ``family``."""

    family: socket.AddressFamily
    sockaddr: tuple[Any, ...]

    @property
    def host(self) -> str:
        """The IP address; of a link-local one with its scope."""
        scope = self.sockaddr[3] if self.family == socket.AF_INET6 else 0
        return f"{self.sockaddr[0]}%{scope}" if scope and "%" not in self.sockaddr[0] else str(self.sockaddr[0])


class Resolver(Protocol):
    """Looks names up."""

    async def resolve(self, host: str, port: int) -> Sequence[Address]:
        """Return a host's addresses, at least one; raises ``OSError``."""


class SystemResolver:
    """Asks the system's resolver, on a thread of the event loop."""

    async def resolve(self, host: str, port: int) -> Sequence[Address]:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
        )
        return [Address(family=family, sockaddr=sockaddr) for family, _, _, _, sockaddr in found]
