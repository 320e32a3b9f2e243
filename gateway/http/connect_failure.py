"""Why there is no connection to an instance, told without its address: whoever may see the fleet's state reads it."""

import errno
import os
import socket
import ssl

import aiohttp


def is_own_fault(error: OSError) -> bool:
    """Whether there is no connection because this process, or its machine, has no file descriptor left."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    return cause.errno in {errno.EMFILE, errno.ENFILE}


def why_unreachable(error: OSError) -> str:
    """Return why there is no connection, as the system calls it: "Connection refused". The texts of asyncio and aiohttp
    have the address in them.
    """
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, ssl.SSLError):  # its errno is OpenSSL's
        return f"TLS failed: {cause.reason}"
    if isinstance(cause, socket.gaierror):  # its errno is the resolver's
        return cause.strerror or "its name can't be resolved"
    return os.strerror(cause.errno) if cause.errno else "none of its addresses answers"


__all__ = ["is_own_fault", "why_unreachable"]
