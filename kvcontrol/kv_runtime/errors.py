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
    """A caller frees a block twice, names an unknown one, or makes an impossible request; nothing was changed."""


class ArenaError(KvRuntimeError):
    """Host memory for blocks is unavailable; the message has the amount and the reason."""


class NativeError(KvRuntimeError):
    """The native helper is unavailable; the message has the reason."""


class BackendError(KvRuntimeError):
    """A tier's backend can't be set up; the message names the fault and the allowed values."""


class BlockFileError(KvRuntimeError):
    """A file of blocks can't be used; the message names the file, the fault and a remedy."""


class QuotaError(KvRuntimeError, ValueError):
    """An invalid quota; nothing was changed. The message names the fault and the allowed values."""


class RequestError(KvRuntimeError, ValueError):
    """A request is not known, known already, or in another state than a call needs; nothing was changed."""
