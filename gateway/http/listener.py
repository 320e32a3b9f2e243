"""How an address that several processes listen on is given up without losing a connection.

A connection waits in the listener's queue until a process accepts it; when the last one closes the listener, those that
wait are reset, and a client can't know whether its request was read. So the kernel is told first to drop whatever asks
for a new connection (a filter on the socket, which all processes share); what waits is accepted; then the socket is
shut down for all of them, also for one that hangs. A client that asked meanwhile tries again after a second and is
refused.
"""

import ctypes
import errno
import socket
import struct
import sys
import time
from typing import Final

_ATTACH_FILTER: Final = 26
_FLAGS_AT: Final = 13
_SYN: Final = 0x02
_LOAD_BYTE, _SKIP_UNLESS_SET, _RETURN = 0x30, 0x45, 0x06
_DROP_NEW: Final = (
    (_LOAD_BYTE, 0, 0, _FLAGS_AT),
    (_SKIP_UNLESS_SET, 0, 1, _SYN),
    (_RETURN, 0, 0, 0),
    (_RETURN, 0, 0, 0xFFFF_FFFF),
)
"""Linux' classic packet filter: of TCP segments those with SYN are dropped."""

_INFO_BYTES: Final = 104
_WAITING_AT: Final = 24
_POLL_S: Final = 0.01
_QUIET_S: Final = 0.05
"""Handshakes that are under way when the filter comes end within this time."""


def take_no_more(listener: socket.socket, *, limit_s: float) -> None:
    """Let nothing new in, and return once all that waits has been accepted elsewhere, after ``limit_s`` at the
    latest. Only Linux can do that; elsewhere it returns at once.
    """
    if sys.platform != "linux":
        return
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in _DROP_NEW))
    header = struct.pack("HP", len(_DROP_NEW), ctypes.addressof(program))
    try:
        listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, header)
    except OSError as error:
        if error.errno not in {errno.ENOPROTOOPT, errno.EPERM, errno.EOPNOTSUPP}:
            raise
        return  # a sandbox whose kernel has no filters
    now_s = time.monotonic()
    ends_s, quiet_s = now_s + limit_s, now_s + _QUIET_S
    while now_s < min(ends_s, quiet_s):
        time.sleep(_POLL_S)
        now_s = time.monotonic()
        if waiting(listener):
            quiet_s = now_s + _QUIET_S


def refuse_all(listener: socket.socket) -> None:
    """Refuse new connections from now on, whatever other processes that share the listener do.

    Connections that still wait are reset. Only Linux can do that; elsewhere the last process to close refuses them.
    """
    if sys.platform == "linux":
        listener.shutdown(socket.SHUT_RDWR)


def waiting(listener: socket.socket) -> int:
    """Return how many connections wait to be accepted."""
    info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    return int(struct.unpack_from("I", info, _WAITING_AT)[0])
