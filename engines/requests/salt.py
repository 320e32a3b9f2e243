"""The tenant's salt, which a request's headers contain: equal tokens of two salts never share KV."""

from typing import Final

from engines.requests.headers import HeaderError, Headers, HeaderValue, single
from kvcontrol.core.control import CACHE_SALT_HEADER
from kvcontrol.core.hashing import MAX_SALT_BYTES


class CacheSaltError(HeaderError):
    """The salt header of a request is not what is allowed; the message never repeats its value."""

    code = "invalid_cache_salt"


def salt_of_headers(headers: Headers) -> str:
    """Return the salt of a request, "" where the header is absent; raises ``CacheSaltError``."""
    value = single(headers, CACHE_SALT_HEADER, CacheSaltError)
    if value is None:
        return ""
    if not 1 <= len(value) <= MAX_SALT_BYTES:
        raise CacheSaltError(
            CACHE_SALT_HEADER,
            f"is {len(value)} bytes long; 1 to {MAX_SALT_BYTES} are allowed"
            " (leave the header out for unsalted requests)",
        )
    if any(not 0x21 <= byte <= 0x7E for byte in value):  # noqa: PLR2004  # "!" to "~"
        raise CacheSaltError(CACHE_SALT_HEADER, "holds a byte that is not a printable ASCII character without space")
    return value.decode("ascii")


SALT: Final = HeaderValue("kvgate_cache_salt", absent="", read=salt_of_headers, scopes=("http", "websocket"))
