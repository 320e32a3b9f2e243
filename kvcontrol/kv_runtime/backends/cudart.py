"""The CUDA runtime that torch has loaded, called without torch: its few functions that copy, pin and wait.

Calls that take long let go of the GIL. Those of a microsecond keep it: to get it back beside a busy engine loop takes
milliseconds. Functions return CUDA's error code, 0 for success, and raise nothing.
"""

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from pathlib import Path

from kvcontrol.kv_runtime.backends.dma import Operations
from kvcontrol.kv_runtime.errors import BackendError

_LIBRARY = re.compile(r"libcudart[-.][^/]*$")
_BATCH_SINCE = 12_080
_BATCH_WITHOUT_FAILED_INDEX_SINCE = 13_000
_NOT_SUPPORTED = frozenset({36, 801})  # the driver is older than the runtime; not on this device
_ATTRIBUTE_MAX_PITCH = 11
_COPY_BY_ADDRESS = 4  # cudaMemcpyDefault: the direction follows from the addresses
_HOST_REGISTER_PORTABLE = 1
_CAPTURE_RELAXED = 2

NOT_READY = 600
"""The error code of an event that hasn't passed."""


class CudaRuntime:
    """libcudart at ``path``; ``version`` is 1000 * major + 10 * minor.

    Raises ``BackendError`` when it can't be used.
    """

    def __init__(self, path: str) -> None:
        try:
            self._long = ctypes.CDLL(path)
            self._brief = ctypes.PyDLL(path)
            self._declare()
        except (OSError, AttributeError) as error:
            raise BackendError(f"{path} is no usable CUDA runtime: {error}") from error
        version = c_int()
        self._brief.cudaRuntimeGetVersion(byref(version))
        self.version = version.value
        self.batches = self.version >= _BATCH_SINCE and hasattr(self._long, "cudaMemcpy3DBatchAsync")

    @classmethod
    def loaded(cls) -> "CudaRuntime":
        """Return the CUDA runtime that torch has loaded; another copy would not know its contexts and streams."""
        for line in Path("/proc/self/maps").read_text().splitlines():
            _, _, path = line.partition("/")
            if _LIBRARY.search(path):
                return cls("/" + path)
        raise BackendError("torch has loaded no libcudart; transfers to a CUDA device need a torch built with it")

    def max_pitch_bytes(self, device: int) -> int:
        """Return the largest pitch that strided copies support (0 if the device doesn't report it)."""
        value = c_int()
        self._brief.cudaDeviceGetAttribute(byref(value), _ATTRIBUTE_MAX_PITCH, device)
        return value.value

    def copy(self, operations: Operations, stream: int) -> int:
        """Queue all copies: with one call where there are batches, else with one a copy. Doesn't wait."""
        if self.batches:
            code = self._copy_batch(operations, stream)
            if code not in _NOT_SUPPORTED:
                return code
            self.batches = False
            self._brief.cudaGetLastError()
        return self._copy_each(operations, stream)

    def synchronize(self, stream: int) -> int:
        """Wait until all that was queued on the stream is done."""
        return int(self._long.cudaStreamSynchronize(stream))

    def pin(self, address: int, size_bytes: int) -> int:
        """Lock host memory in place, so that the device reads and writes it at link speed."""
        return int(self._long.cudaHostRegister(address, size_bytes, _HOST_REGISTER_PORTABLE))

    def unpin(self, address: int) -> int:
        """Undo ``pin``."""
        return int(self._long.cudaHostUnregister(address))

    def passed(self, event: int) -> int:
        """Return 0 when an event has completed, ``NOT_READY`` before."""
        code = int(self._brief.cudaEventQuery(event))
        if code:
            self._brief.cudaGetLastError()
        return code

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Make ``device`` the calling thread's, and let its calls neither fail nor spoil a graph that another captures.

        All is as it was afterwards.
        """
        before, mode = c_int(device), c_int(_CAPTURE_RELAXED)
        self._brief.cudaGetDevice(byref(before))
        self._brief.cudaSetDevice(device)
        self._brief.cudaThreadExchangeStreamCaptureMode(byref(mode))
        try:
            yield
        finally:
            self._brief.cudaThreadExchangeStreamCaptureMode(byref(mode))
            self._brief.cudaSetDevice(before)

    def text(self, code: int) -> str:
        """Return the text of an error code, and clear the thread's last error."""
        self._brief.cudaGetLastError()
        return f"CUDA error {code}: {self._brief.cudaGetErrorString(code).decode(errors='replace')}"

    def _copy_batch(self, operations: Operations, stream: int) -> int:
        call = self._long.cudaMemcpy3DBatchAsync
        count, address = c_size_t(len(operations)), c_void_p(operations.ctypes.data)
        flags = c_ulonglong(0)
        if self.version >= _BATCH_WITHOUT_FAILED_INDEX_SINCE:
            return int(call(count, address, flags, c_void_p(stream)))
        failed = c_size_t()
        return int(call(count, address, byref(failed), flags, c_void_p(stream)))

    def _copy_each(self, operations: Operations, stream: int) -> int:
        source, target = operations["source"], operations["target"]
        columns = (
            target["address"],
            target["pitch"],
            source["address"],
            source["pitch"],
            operations["width"],
            operations["height"],
        )
        for copy in zip(*(column.tolist() for column in columns), strict=True):
            code = int(self._brief.cudaMemcpy2DAsync(*copy, _COPY_BY_ADDRESS, stream))
            if code:
                return code
        return 0

    def _declare(self) -> None:
        brief, long = self._brief, self._long
        brief.cudaRuntimeGetVersion.argtypes = [POINTER(c_int)]
        brief.cudaDeviceGetAttribute.argtypes = [POINTER(c_int), c_int, c_int]
        brief.cudaGetErrorString.argtypes = [c_int]
        brief.cudaGetErrorString.restype = c_char_p
        brief.cudaGetLastError.argtypes = []
        brief.cudaGetDevice.argtypes = [POINTER(c_int)]
        brief.cudaSetDevice.argtypes = [c_int]
        brief.cudaEventQuery.argtypes = [c_void_p]
        brief.cudaThreadExchangeStreamCaptureMode.argtypes = [POINTER(c_int)]
        sizes = (c_void_p, c_size_t, c_void_p, c_size_t, c_size_t, c_size_t)
        brief.cudaMemcpy2DAsync.argtypes = [*sizes, c_int, c_void_p]
        long.cudaStreamSynchronize.argtypes = [c_void_p]
        long.cudaHostRegister.argtypes = [c_void_p, c_size_t, c_uint]
        long.cudaHostUnregister.argtypes = [c_void_p]
