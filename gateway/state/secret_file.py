"""A secret that is made once and kept in the state folder, for its owner alone to read."""

import os
import secrets
import stat
from pathlib import Path

from gateway.errors import StateError

SECRET_BYTES = 32


def load_secret(path: Path, *, what: str) -> bytes:
    """Return the secret, making it (and its folder) when there is none yet.

    Of several gateways that start at once one makes it and all read the same. Raises ``StateError`` when it can't be
    read or written, is damaged, or can be read by others; ``what`` names it then.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            _create(path)
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StateError(f"{path}: the {what} can't be read or made: {error}") from error
    if mode & 0o077:
        raise StateError(
            f"{path}: has mode {mode:04o}, others can read it; run chmod 600 on it, or remove it to get a new one"
        )
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise StateError(f"{path}: is not {SECRET_BYTES} bytes in hex; restore it, or remove it to get a new one")
    return secret


def _create(path: Path) -> None:
    """Write the file beside its place and link it there: it appears whole, and only once."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(SECRET_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            path.hardlink_to(scratch)
        except FileExistsError:
            return
    finally:
        scratch.unlink(missing_ok=True)
