"""TCP ports: which are free, and who has the one that isn't."""

import errno
import ipaddress
import socket
from contextlib import ExitStack

import psutil

from kvgate.failure import CommandError

LOOPBACK = "127.0.0.1"
MAX_PORT = 65535


def free_ports(count: int) -> list[int]:
    """Return distinct ports of the loopback address that nothing listens on now.

    They are free when this returns, not reserved: whoever needs one should listen on it soon.
    """
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]


def need_free(host: str, port: int, *, option: str = "--port") -> None:
    """Raise ``CommandError`` naming the holder unless ``host:port`` can be listened on."""
    if not 0 < port <= MAX_PORT:
        raise CommandError(f"{option} is {port}; a port is a number from 1 to {MAX_PORT}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise CommandError(f"{host} is not an address of this machine: {error.strerror}") from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise _refusal(host, port, option, error) from error


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach ``host``; False for a name that isn't ``localhost``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _refusal(host: str, port: int, option: str, error: OSError) -> CommandError:
    if error.errno == errno.EADDRINUSE:
        return CommandError(
            f"port {port} on {host} is in use{_holder(port)}", f"stop that, or choose another with {option}"
        )
    if error.errno == errno.EACCES:
        return CommandError(f"port {port} on {host} needs privileges", f"choose one above 1023 with {option}")
    return CommandError(f"can't listen on {host}:{port}: {error.strerror}")


def _holder(port: int) -> str:
    """`` by NAME (pid N)`` where this user may know it, else nothing."""
    try:
        for connection in psutil.net_connections("tcp"):
            here = connection.laddr
            if connection.status == psutil.CONN_LISTEN and here and here.port == port and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        pass  # the name is a courtesy; who may not see it still learns that the port is taken
    return ""


__all__ = ["LOOPBACK", "free_ports", "is_loopback", "need_free"]
