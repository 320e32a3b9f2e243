"""Reasons of failed connections to instances, without addresses: reports of the fleet contain them."""

import errno
import os
import socket
import ssl

import httpx2


def _cause_of(error: BaseException) -> OSError | None:
    """Return the system's error below those of asyncio, aiohappyeyeballs and httpx2: the deepest with a number."""
    found: OSError | None = None
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, OSError) and (found is None or at.errno):
            found = at
        inner = at.__cause__ or at.__context__
        at = inner.exceptions[-1] if isinstance(inner, BaseExceptionGroup) else inner
    return found


def is_own_fault(error: Exception) -> bool:
    """Whether there is no connection because this process, or its machine, has no file descriptor left."""
    cause = _cause_of(error)
    return cause is not None and cause.errno in {errno.EMFILE, errno.ENFILE}


def connect_failure_reason(error: Exception) -> str:
    """Return why there is no connection, as the system calls it: "Connection refused". The texts of asyncio
    have the address in them.
    """
    cause = _cause_of(error)
    if cause is None:
        return "no connection within the time for it" if isinstance(error, httpx2.TimeoutException) else str(error)
    if isinstance(cause, ssl.SSLError):  # its errno is OpenSSL's
        return f"TLS failed: {cause.reason}"
    if isinstance(cause, socket.gaierror):  # its errno is the resolver's
        return cause.strerror or "its name can't be resolved"
    return os.strerror(cause.errno) if cause.errno else "none of its addresses answers"
