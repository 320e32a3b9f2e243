"""The runtime's few lines of C, compiled when first needed, and the library functions that they call.

Python's libraries let go of the GIL for one block and take it back after it. Beside an engine loop that is always
running Python, each way back waits for the interpreter's switch interval, so 255 blocks of 3.7 MB took longer to check
than to move. One native call for many blocks takes it back once. It needs a C compiler, which a machine with a GPU has
anyway (Triton needs one), at run time alone; the result is kept in the user's cache. Where it can't be had,
``NativeError`` says why, and its users do the same block by block.
"""

import ctypes
import os
import shutil
import subprocess
import sysconfig
import tempfile
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import xxhash

from kvcontrol.kv_runtime.errors import NativeError

_SOURCE: Final = Path(__file__).with_suffix(".c")
_COMPILE_WITHIN_S: Final = 30.0
_FLAGS: Final = ("-O2", "-shared", "-fPIC")


class Native:
    """The loaded helper: ``checksums`` as native.c describes it, without the GIL; ``hash`` is where XXH3_64bits is."""

    def __init__(self, library: Path) -> None:
        try:
            loaded = ctypes.CDLL(str(library))
            self.checksums: Any = loaded.kv_checksums
            self.hash = ctypes.cast(_xxh3(), ctypes.c_void_p)
        except (OSError, AttributeError) as error:
            raise NativeError(f"{library} or the xxhash package can't be used: {error}") from error
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self.checksums.restype = None
        self.checksums.argtypes = [pointer, pointer, pointer, size, size, pointer]


@cache
def native() -> Native:
    """Return the helper, compiled if need be; ``NativeError``."""
    return Native(compiled())


def compiled() -> Path:
    """Return the library, compiled if this user has none of this source; ``NativeError`` when that can't be."""
    try:
        source = _SOURCE.read_bytes()
        name = blake2b(source + repr((_FLAGS, sysconfig.get_platform())).encode(), digest_size=8).hexdigest()
        folder = _cache_dir()
        library = folder / f"kv_native-{name}.so"
        if not library.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                made = Path(scratch) / library.name
                _compile(made)
                made.replace(library)  # whole or not at all, also where two processes start at once
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise NativeError(f"it can't be compiled: {error}") from error
    return library


def _compile(library: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise OSError("no C compiler (cc, gcc, clang) is on the PATH")
    done = subprocess.run(  # noqa: S603 - our own source, the machine's compiler
        [compiler, *_FLAGS, "-o", str(library), str(_SOURCE)],
        capture_output=True,
        text=True,
        timeout=_COMPILE_WITHIN_S,
        check=False,
    )
    if done.returncode != 0:
        raise OSError(f"{compiler} failed: {done.stderr.strip()[-500:]}")


def _cache_dir() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if home else Path.home() / ".cache") / "kvgate"


def _xxh3() -> Any:
    """XXH3_64bits of the library that the xxhash package consists of; the one that asks the CPU, where there is one."""
    library = ctypes.CDLL(xxhash._xxhash.__file__)  # type: ignore[attr-defined]  # noqa: SLF001
    return getattr(library, "XXH3_64bits_dispatch", None) or library.XXH3_64bits
