"""The API keys that a request brings along."""

from collections.abc import Iterable
from typing import Final

Header = tuple[bytes, bytes]

_BEARER: Final = b"bearer"


def keys_of(headers: Iterable[Header]) -> tuple[bytes, ...]:
    """Return the keys in ``Authorization: Bearer`` headers and then those in ``x-api-key``, each once, in order.

    Other schemes hold no key of ours: a proxy's ``Authorization: Basic`` stands beside an ``x-api-key``. Names are in
    lower case.
    """
    bearers: list[bytes] = []
    plain: list[bytes] = []
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() == _BEARER and (key := key.strip()):
                bearers.append(key)
        elif name == b"x-api-key" and (key := value.strip()):
            plain.append(key)
    keys = (*bearers, *plain)
    return keys if len(keys) < 2 else tuple(dict.fromkeys(keys))  # noqa: PLR2004 - most have one
