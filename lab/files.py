"""Files that commands write: whole, or not at all."""

import io
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_whole(path: Path, data: bytes) -> None:
    """Write a file beside its place, and put it there when it is whole: a full disk leaves what was there before.

    What is there and is no regular file (a pipe, a terminal) is written to as it is. Raises ``OSError``.
    """
    place = path.resolve()  # a link stays one
    if place.exists() and not place.is_file():
        place.write_bytes(data)
        return
    scratch = place.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with scratch.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if place.exists():
            scratch.chmod(place.stat().st_mode & 0o7777)
        scratch.replace(place)
    except BaseException:
        with suppress(OSError):  # it may never have been there; what failed first is what is told
            scratch.unlink(missing_ok=True)
        raise


def write_picture(figure: Any, path: Path) -> None:
    """Write one of matplotlib's figures whole, in the format that the name ends in. Raises ``OSError``."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:].lower())
    write_whole(path, drawn.getvalue())
