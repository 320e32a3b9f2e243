"""Errors of the runtime.

KvControlError
└── KvRuntimeError
    ├── AllocationError  slots or blocks are used against their contract: freed twice, unknown, out of range
    ├── ArenaError       host memory for blocks can't be had
    ├── BackendError     a tier's backend can't be set up
    ├── BlockFileError   a file of blocks can't be used
    ├── NativeError      the native helper can't be had; its users do without
    ├── QuotaError       a quota out of range, or accounts that don't add up
    └── RequestError     a request is unknown, known already, or in another state
"""

from kvcontrol.core.errors import KvControlError


class KvRuntimeError(KvControlError):
    """Base of the runtime's errors."""


class AllocationError(KvRuntimeError, ValueError):
    """A caller frees twice, names what isn't there, or asks for what can't be; nothing was changed."""


class ArenaError(KvRuntimeError):
    """Host memory for blocks can't be had; the message says how much was asked for and why not."""


class NativeError(KvRuntimeError):
    """There is no native helper here; the message says why."""


class BackendError(KvRuntimeError):
    """A tier's backend can't be set up; the message names what was wrong and what is allowed."""


class BlockFileError(KvRuntimeError):
    """A file of blocks can't be used; the message names the file, what is wrong with it and what would help."""


class QuotaError(KvRuntimeError, ValueError):
    """A quota that can't be; nothing was changed. The message names what was wrong and what is allowed."""


class RequestError(KvRuntimeError, ValueError):
    """A request is not known, known already, or in another state than a call needs; nothing was changed."""


__all__ = [
    "AllocationError",
    "ArenaError",
    "BackendError",
    "BlockFileError",
    "KvRuntimeError",
    "NativeError",
    "QuotaError",
    "RequestError",
]
