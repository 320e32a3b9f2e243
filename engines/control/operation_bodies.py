"""Bodies of operators' calls: parsed, or refused with the allowed values."""

import re
from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

import msgspec

from engines.control.errors import RefusedError
from kvcontrol.core.errors import UNREADABLE
from kvcontrol.core.hashing import HASH_BYTES
from kvcontrol.core.ids import BlockHash

_HASH: Final = re.compile(rf"[0-9a-fA-F]{{{2 * HASH_BYTES}}}")

_Body = TypeVar("_Body")


def parsed(body: bytes, kind: type[_Body], allowed: Mapping[type, str]) -> _Body:
    """Return a body of this kind; raises ``RefusedError`` with the text in ``allowed``."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except UNREADABLE as error:
        raise RefusedError(f"invalid request: {error}; allowed: {allowed[kind]}") from error


def block_hashes(texts: Iterable[str], *, field: str = "hashes") -> list[BlockHash]:
    """Return hashes as bytes; raises ``RefusedError`` for the first that is none."""
    keys = []
    for text in texts:
        if not _HASH.fullmatch(text):
            raise RefusedError(f"{field}: {text[:64]!r} is no name of a block; it is {2 * HASH_BYTES} hex digits")
        keys.append(BlockHash(bytes.fromhex(text)))
    return keys
