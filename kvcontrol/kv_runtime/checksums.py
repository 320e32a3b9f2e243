"""Checksums of arena slots, many at a time.

Python's xxhash lets go of the GIL for a block and takes it back after it. Beside an engine loop that is always running
Python, each way back waits for the interpreter's switch interval, so 255 blocks of 3.7 MB took longer to check than to
move. The remedy is one native call for many blocks: a loop of three lines of C over the very function that the xxhash
package brings. It is compiled when first needed, with the C compiler that a machine with a GPU has anyway (Triton needs
one), and kept in the user's cache. Without a compiler, or with an xxhash that hides its functions, blocks are summed
one by one: the same values, later.
"""

import ctypes
import logging
import os
import shutil
import subprocess
import sysconfig
import tempfile
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import xxhash

from kvcontrol.kv_runtime.arena import HostArena
from kvcontrol.kv_runtime.record import checksum

Checksums = Callable[[HostArena, Sequence[int]], list[int]]
"""The checksums (``record.checksum``) of an arena's slots, in order; any thread."""

_SOURCE: Final = Path(__file__).with_suffix(".c")
_COMPILE_WITHIN_S: Final = 30.0
_FLAGS: Final = ("-O2", "-shared", "-fPIC")
_PROBE: Final = bytes(range(256)) * 5

_log = logging.getLogger(__name__)


def one_by_one(arena: HostArena, slots: Sequence[int]) -> list[int]:
    """Compute them in Python; see ``Checksums``. ``IndexError`` for a slot that isn't there."""
    return [checksum(arena.view(slot)) for slot in slots]


class NativeChecksums:
    """A ``Checksums`` that is one native call without the GIL.

    ``OSError`` or ``AttributeError`` when it can't be had.
    """

    def __init__(self, library: Path) -> None:
        self._hash = ctypes.cast(_xxh3(), ctypes.c_void_p)
        self._call = ctypes.CDLL(str(library)).kv_checksums
        self._call.restype = None
        self._call.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_size_t,
            ctypes.c_void_p,
        ]

    def __call__(self, arena: HostArena, slots: Sequence[int]) -> list[int]:
        if slots and not (min(slots) >= 0 and max(slots) < arena.slots):
            raise IndexError(f"slots {min(slots)} to {max(slots)} of an arena with {arena.slots}")
        pitch = arena.pitch_bytes
        with arena.whole():  # the memory can't be given back meanwhile
            return self._sums(arena.address, array("Q", [slot * pitch for slot in slots]), arena.block_bytes)

    def of_bytes(self, data: bytes) -> int:
        """Return one buffer's."""
        address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
        return self._sums(address, array("Q", [0]), len(data))[0]

    def _sums(self, address: int, offsets: "array[int]", size_bytes: int) -> list[int]:
        sums = array("Q", bytes(offsets.itemsize * len(offsets)))
        self._call(self._hash, address, offsets.buffer_info()[0], len(offsets), size_bytes, sums.buffer_info()[0])
        return sums.tolist()


@cache
def fastest() -> Checksums:
    """Return the native one where it can be had and is right, else ``one_by_one``, and say which. Compiles once."""
    try:
        native = NativeChecksums(_compiled())
        right = native.of_bytes(_PROBE) == checksum(_PROBE)
        problem: Exception | str = "the compiled helper computes something else than the xxhash package"
    except (OSError, AttributeError, RuntimeError, subprocess.SubprocessError) as error:
        right, problem = False, error
    if not right:
        _log.warning("blocks' checksums are computed one by one, slower beside a busy engine: %s", problem)
        return one_by_one
    return native


def _xxh3() -> Any:
    """XXH3_64bits of the library that the xxhash package consists of; the one that asks the CPU, where there is one."""
    library = ctypes.CDLL(xxhash._xxhash.__file__)  # type: ignore[attr-defined]  # noqa: SLF001
    return getattr(library, "XXH3_64bits_dispatch", None) or library.XXH3_64bits


def _compiled() -> Path:
    """Return the library, compiled if this user has none of this source; ``OSError`` when that can't be."""
    source = _SOURCE.read_bytes()
    name = blake2b(source + repr((_FLAGS, sysconfig.get_platform())).encode(), digest_size=8).hexdigest()
    folder = _cache_dir()
    library = folder / f"kv_checksums-{name}.so"
    if library.exists():
        return library
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise OSError("no C compiler (cc, gcc, clang) is on the PATH")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / library.name
        done = subprocess.run(  # noqa: S603 - our own source, the machine's compiler
            [compiler, *_FLAGS, "-o", str(made), str(_SOURCE)],
            capture_output=True,
            text=True,
            timeout=_COMPILE_WITHIN_S,
            check=False,
        )
        if done.returncode != 0:
            raise OSError(f"{compiler} failed: {done.stderr.strip()[-500:]}")
        made.replace(library)  # whole or not at all, also where two processes start at once
    return library


def _cache_dir() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if home else Path.home() / ".cache") / "kvgate"


__all__ = ["Checksums", "NativeChecksums", "fastest", "one_by_one"]
