"""Model folders that are made once and kept: whole or absent, verified, built by one process at a time.

A cached folder is complete when its manifest is: a file that names the recipe it was made with and the SHA-256 of every
other file. It is built beside its place and renamed, the manifest is written last, and every use checks it. So a
half-written, truncated, edited or outdated folder is never used; it is built again.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

MANIFEST = "kvgate-manifest.json"
LOCK_LIMIT_S = 1800.0
LOCK_POLL_S = 0.5


class CacheError(Exception):
    """A model can't be had; ``message`` says why, ``advice`` what to do."""

    def __init__(self, message: str, advice: str = "") -> None:
        self.message = message
        self.advice = advice
        super().__init__(message)


class Progress(Protocol):
    """Who is told how far a preparation is."""

    def begin(self, what: str, total_bytes: int | None = None) -> None:
        """A step begins; ``total_bytes`` None when its length is unknown. The one before is done."""

    def reached(self, done_bytes: int) -> None:
        """The step has come to ``done_bytes`` of its total."""

    def note(self, what: str) -> None:
        """Something worth a line happened, that isn't a step."""


class Silent:
    """A ``Progress`` for nobody."""

    def begin(self, what: str, total_bytes: int | None = None) -> None:
        """Say nothing."""

    def reached(self, done_bytes: int) -> None:
        """Say nothing."""

    def note(self, what: str) -> None:
        """Say nothing."""


def cache_dir() -> Path:
    """Return ``$KVGATE_CACHE_DIR``, else ``$XDG_CACHE_HOME/kvgate``, else ``~/.cache/kvgate``; it need not exist."""
    if named := os.environ.get("KVGATE_CACHE_DIR"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvgate"


def cached(folder: Path, build: Callable[[Path], None], *, recipe: str, needed_bytes: int, progress: Progress) -> Path:
    """Return ``folder`` as ``build`` makes it, building it only when it isn't there whole.

    ``build`` gets an empty folder to fill. ``recipe`` names how it is made: another one means another folder.
    ``needed_bytes`` is the room that building takes, checked first. Raises ``CacheError``; what ``build`` raises passes
    through, a full disk as ``CacheError``.
    """
    if problem_of(folder, recipe) is None:
        return folder
    with _disk_errors(folder), _locked(folder, progress):
        problem = problem_of(folder, recipe)
        if problem is None:  # someone else built it meanwhile
            return folder
        if folder.exists():
            progress.note(f"{folder} can't be used ({problem}); making it again")
            shutil.rmtree(folder)
        _sweep(folder)
        require_space(folder.parent, needed_bytes)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=_scratch_prefix(folder)) as scratch:
            built = Path(scratch) / "model"
            built.mkdir()
            build(built)
            _write_manifest(built, recipe)
            built.rename(folder)
    return folder


def problem_of(folder: Path, recipe: str) -> str | None:
    """Say why a cached folder can't be used, None when it can. Reads every byte: about 0.5 s per GB."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = dict(manifest["files"])
        made_with = manifest["recipe"]
    except FileNotFoundError:
        return "it is not complete"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its manifest can't be read: {error}"
    if made_with != recipe:
        return "it was made by another version of kvgate"
    for name, digest in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if sha256_of(path) != digest:
            return f"{name} is damaged"
    return None


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256 as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_space(folder: Path, needed_bytes: int) -> None:
    """Raise ``CacheError`` unless the disk of ``folder`` has so much free."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise CacheError(
            f"{folder} has {free_bytes / 1e6:.0f} MB free, {needed_bytes / 1e6:.0f} MB are needed",
            "free some space, or name a folder on another disk with KVGATE_CACHE_DIR",
        )


def _write_manifest(folder: Path, recipe: str) -> None:
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
            files[str(path.relative_to(folder))] = sha256_of(path)
    (folder / MANIFEST).write_text(json.dumps({"recipe": recipe, "files": files}, indent=1))


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        reason = "the disk is full" if full else error.strerror or str(error)
        raise CacheError(
            f"cannot write {folder}: {reason}",
            "free some space, or name another folder with KVGATE_CACHE_DIR",
        ) from error


@contextmanager
def _locked(folder: Path, progress: Progress) -> Iterator[None]:
    """Hold the folder's lock; the kernel frees it when its holder dies. Waits at most ``LOCK_LIMIT_S``."""
    deadline_s = time.monotonic() + LOCK_LIMIT_S
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        logged = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not logged:
                    progress.note(f"another process is making {folder}; waiting for it")
                    logged = True
                if time.monotonic() > deadline_s:
                    raise CacheError(
                        f"another process has been making {folder} for {LOCK_LIMIT_S / 60:.0f} min"
                    ) from None
                time.sleep(LOCK_POLL_S)
        yield


def _scratch_prefix(folder: Path) -> str:
    return f".{folder.name}-"


def _sweep(folder: Path) -> None:
    """Remove what builders that were killed have left; the lock is held, so none is at work."""
    for left in folder.parent.glob(f"{_scratch_prefix(folder)}*"):
        with contextlib.suppress(OSError):
            shutil.rmtree(left)
