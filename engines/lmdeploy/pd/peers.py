"""The hosts that may exchange KV blocks with this instance."""

import ipaddress
import socket
import time
from collections.abc import Sequence

from engines.lmdeploy.pd.networks import Network
from engines.lmdeploy.pd.wire import Connection, TransferError


class Peers:
    """The hosts of a list of networks."""

    def __init__(self, networks: Sequence[Network]) -> None:
        self._networks = tuple(networks)

    def admits(self, address: str) -> bool:
        """Whether ``address`` (numeric) is a peer's."""
        try:
            host = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False
        if isinstance(host, ipaddress.IPv6Address) and host.ipv4_mapped is not None:
            host = host.ipv4_mapped
        return any(host.version == network.version and host in network for network in self._networks)

    def connect(self, host: str, port: int, *, timeout_s: float) -> Connection:
        """Return a connection to one of them, with ``timeout_s`` for all that is to be said; raises ``TransferError``
        for a host that isn't listed, whatever its name resolves to, and for one that can't be reached.
        """
        deadline_s = time.monotonic() + timeout_s
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # the latter of what no name can be
            raise TransferError("unreachable", f"{host} has no address: {error}") from error
        addresses = [address for *_, address in found if self.admits(str(address[0]))]
        if not addresses:
            raise TransferError("unlisted", f"{host} is not in the list of peers")
        try:
            sock = socket.create_connection((str(addresses[0][0]), port), timeout=timeout_s)
        except OSError as error:
            raise TransferError("unreachable", f"{host}:{port} can't be reached: {error}") from error
        return Connection(sock, deadline_s=deadline_s)
