"""Closes a listening socket that several processes share without losing a connection.

A connection waits in the listener's queue until a process accepts it. When the last process closes the listener, the
kernel resets the waiting connections, and their clients can't know whether a request was read. So first a filter on the
shared socket drops new connection attempts; the processes accept the waiting connections; then the socket is shut down
for all of them, also for one that hangs. A client whose attempt was dropped tries again after a second and is refused.
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
"""Handshakes in progress end within this time after the filter was attached."""


def take_no_more(listener: socket.socket, *, limit_s: float) -> None:
    """Drop new connection attempts, and return once other processes have accepted all waiting connections, after
    ``limit_s`` at the latest. Only Linux can do that; elsewhere it returns at once.
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
    """Refuse new connections from now on, also in other processes that share the listener.

    Connections that still wait are reset. Only Linux can do that; elsewhere the last process to close refuses them.
    """
    if sys.platform == "linux":
        listener.shutdown(socket.SHUT_RDWR)


def waiting(listener: socket.socket) -> int:
    """Return how many connections wait to be accepted."""
    info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    return int(struct.unpack_from("I", info, _WAITING_AT)[0])
