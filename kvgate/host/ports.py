"""TCP ports: which are free, how they stay so, and who has the one that isn't.

A server that loads for a minute before it listens can lose a port that was free when it was chosen: the kernel gives
any port of its ephemeral range to whoever connects somewhere. So ports are chosen outside that range, and
``reserved_ports`` holds its own: bound, not listening. On Linux a server that sets SO_REUSEADDR (asyncio, uvicorn and
ZMQ do) may bind beside such a socket, and nobody else gets the port. Who chose it before and listens only now would
still take it: those who start many things side by side give each a range of its own in ``KVGATE_PORT_RANGE``.
"""

import errno
import os
import random
import socket
import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from kvgate.failure import CommandError

LOOPBACK = "127.0.0.1"
MAX_PORT = 65535
PORT_RANGE_VARIABLE = "KVGATE_PORT_RANGE"
"""Where ports are chosen: ``FIRST-LAST``."""
_FIRST_PORT = 10000
_FIRST_UNPRIVILEGED = 1024
_ATTEMPTS = 64
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int, *, besides: Collection[int] = ()) -> list[int]:
    """Return distinct ports of the loopback address that nobody has now and the kernel gives to nobody by itself.

    None of them is in ``besides``: what is free now and promised to another server. Raises ``CommandError`` when
    ``KVGATE_PORT_RANGE`` is no range of ports, or has none free.
    """
    with ExitStack() as held:
        return [_bound_socket(held, besides).getsockname()[1] for _ in range(count)]


@contextmanager
def reserved_ports(count: int, *, besides: Collection[int] = ()) -> Iterator[list[int]]:
    """Hold what ``free_ports`` would return for servers that set SO_REUSEADDR, until the block ends.

    Where two sockets can't share a port (not Linux) they are only chosen, as by ``free_ports``.
    """
    if sys.platform != "linux":
        yield free_ports(count, besides=besides)
        return
    with ExitStack() as held:
        sockets = [_bound_socket(held, besides) for _ in range(count)]
        for each in sockets:
            # Only now: bound without it, no port was taken that another reservation holds.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield [each.getsockname()[1] for each in sockets]


def need_free(host: str, port: int, *, option: str = "--port") -> None:
    """Raise ``CommandError`` naming the holder unless ``host:port`` can be listened on."""
    if not 0 < port <= MAX_PORT:
        raise CommandError(f"{option} is {port}; ports are numbers from 1 to {MAX_PORT}")
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


def _bound_socket(held: ExitStack, besides: Collection[int]) -> socket.socket:
    """Return a socket bound to a free port; ``held`` closes it."""
    made = held.enter_context(socket.socket())
    given = _given_range()
    choice = _quiet_ports() if given is None else given
    for port in random.sample(choice, min(_ATTEMPTS, len(choice))):
        if port in besides:
            continue
        try:
            made.bind((LOOPBACK, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        return made
    if given is not None:
        raise CommandError(
            f"no free port from {given[0]} to {given[-1]}", f"set a larger range in {PORT_RANGE_VARIABLE}"
        )
    made.bind((LOOPBACK, 0))  # a crowded machine: any port is better than none
    return made


def _given_range() -> range | None:
    """The ports that ``KVGATE_PORT_RANGE`` names; raises ``CommandError`` when it is no range of them."""
    text = os.environ.get(PORT_RANGE_VARIABLE)
    if not text:
        return None
    first, _, last = text.partition("-")
    if first.isdecimal() and last.isdecimal() and _FIRST_UNPRIVILEGED <= int(first) <= int(last) <= MAX_PORT:
        return range(int(first), int(last) + 1)
    raise CommandError(
        f"{PORT_RANGE_VARIABLE} is {text!r}; expected FIRST-LAST, two ports from {_FIRST_UNPRIVILEGED} to {MAX_PORT}",
        f"for example {PORT_RANGE_VARIABLE}=20000-20999",
    )


def _quiet_ports() -> range:
    """The larger part of the unprivileged ports that the kernel doesn't give away by itself."""
    try:
        low, high = map(int, _EPHEMERAL.read_text().split())
    except (OSError, ValueError):  # not Linux: the range that IANA suggests
        low, high = 49152, MAX_PORT
    below, above = range(_FIRST_PORT, low), range(high + 1, MAX_PORT + 1)
    return max(below, above, key=len) or range(_FIRST_PORT, MAX_PORT + 1)


def _refusal(host: str, port: int, option: str, error: OSError) -> CommandError:
    if error.errno == errno.EADDRINUSE:
        return CommandError(
            f"port {port} on {host} is in use{_holder(port)}", f"stop that, or choose another with {option}"
        )
    if error.errno == errno.EACCES:
        return CommandError(f"port {port} on {host} needs privileges", f"choose one above 1023 with {option}")
    return CommandError(f"cannot listen on {host}:{port}: {error.strerror}")


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
