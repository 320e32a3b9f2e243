"""Compressed request bodies, decoded within bounds.

What comes out is at most the longest body that is allowed, and at most ``_MOST_RATIO`` times as long as what came in:
text shrinks to a twentieth, and what shrinks much more is made to fill memory. All of it takes time and memory that are
linear in what comes out.
"""

import asyncio
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, Protocol

from gateway.errors import BodyTooLargeError, InvalidRequestError, UnsupportedMediaTypeError
from gateway.http.inflate import MOST_AT_ONCE_BYTES, DamagedError, Inflate

Header = tuple[bytes, bytes]

_MOST_RATIO: Final = 128
_ALWAYS_ALLOWED_BYTES: Final = 1 << 20
_MOST_MEMBERS: Final = 4096
_FED_AT_ONCE_BYTES: Final = 64 << 10
_INLINE_BYTES: Final = 4 << 10
_WINDOW_LOG: Final = 23  # 8 MiB, which RFC 8878 asks of every decoder


class _Decoder(Protocol):
    """What ``Inflate`` is, for any encoding."""

    members: int

    @property
    def more(self) -> bool: ...

    @property
    def whole(self) -> bool: ...

    def decode(self, data: bytes = b"") -> bytes: ...


class Unzstd:
    """Zstandard: bytes of one or more frames in, what they hold out, at most ``MOST_AT_ONCE_BYTES`` a step."""

    def __init__(self) -> None:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd  # for those that send it alone

        self._error: type[Exception] = zstd.ZstdError
        bounds = {int(zstd.DecompressionParameter.window_log_max): _WINDOW_LOG}
        self._make: Callable[[], Any] = partial(zstd.ZstdDecompressor, options=bounds)
        self._frame = self._make()
        self._left = b""
        self.members = 1

    @property
    def more(self) -> bool:
        return bool(self._left) or not (self._frame.eof or self._frame.needs_input)

    @property
    def whole(self) -> bool:
        return not self.more and self._frame.eof

    def decode(self, data: bytes = b"") -> bytes:
        left = self._left + data
        if self._frame.eof:
            if not left:
                return b""
            self._frame = self._make()
            self.members += 1
        frame = self._frame
        piece = left[:_INLINE_BYTES] if frame.needs_input else b""
        try:
            found = frame.decompress(piece, max_length=MOST_AT_ONCE_BYTES)
        except self._error as error:
            raise DamagedError(str(error)) from error
        rest = frame.unused_data if frame.eof else b""
        self._left = rest + left[len(piece) :]
        return found


_DECODERS: Final[dict[bytes, Callable[[], _Decoder]]] = {
    b"gzip": Inflate,
    b"x-gzip": Inflate,
    b"deflate": partial(Inflate, may_be_raw=True),
    b"zstd": Unzstd,
}
_NONE: Final = frozenset({b"", b"identity"})


def coding_of(headers: Iterable[Header]) -> bytes | None:
    """Return how a body is encoded, None where it is not. Names of headers are in lower case.

    Raises ``UnsupportedMediaTypeError`` for what can't be decoded here, and for several encodings on each other.
    """
    codings = [
        each
        for name, value in headers
        if name == b"content-encoding"
        for each in (part.strip().lower() for part in value.split(b","))
        if each not in _NONE
    ]
    if not codings:
        return None
    if len(codings) > 1 or codings[0] not in _DECODERS:
        header = b", ".join(codings).decode("latin-1")
        raise UnsupportedMediaTypeError(
            f"content-encoding {header!r} is not decoded here; allowed is one of gzip, deflate, zstd",
            headers=((b"accept-encoding", b"gzip, deflate, zstd"),),
        )
    return codings[0]


def most_decoded_bytes(body: bytes, *, limit_bytes: int) -> int:
    """Return how long a body may be without its encoding."""
    return min(limit_bytes, max(_ALWAYS_ALLOWED_BYTES, _MOST_RATIO * len(body)))


async def decoded(body: bytes, coding: bytes, *, limit_bytes: int) -> bytes:
    """Return a body without its encoding; a long one is decoded on a thread.

    Raises ``BodyTooLargeError`` for what is longer than ``limit_bytes`` or than its ratio allows, and
    ``InvalidRequestError`` for what is damaged.
    """
    if len(body) <= _INLINE_BYTES:
        return decode(body, coding, limit_bytes=limit_bytes)
    return await asyncio.to_thread(decode, body, coding, limit_bytes=limit_bytes)


def decode(body: bytes, coding: bytes, *, limit_bytes: int) -> bytes:
    """``decoded``, at once."""
    decoding = Decoding(body, coding, limit_bytes=limit_bytes)
    decoding.advance()
    return decoding.decoded()


class Decoding:
    """One body that is decoded in parts, so that its memory can be counted."""

    def __init__(self, body: bytes, coding: bytes, *, limit_bytes: int) -> None:
        self._body = body
        self._coding = coding
        self._limit_bytes = limit_bytes
        self._most_bytes = most_decoded_bytes(body, limit_bytes=limit_bytes)
        self._decoder = _DECODERS[coding]()
        self._parts: list[bytes] = []
        self._place = 0
        self.decoded_bytes = 0
        self.ended = False

    def advance(self, most_bytes: int | None = None) -> None:
        """Decode at most so many bytes more, ``MOST_AT_ONCE_BYTES`` at least; all of them by default.

        Raises what ``decoded`` raises.
        """
        until = None if most_bytes is None else self.decoded_bytes + most_bytes - MOST_AT_ONCE_BYTES
        try:
            while not self.ended and (until is None or self.decoded_bytes <= until):
                self._step()
        except DamagedError as error:
            raise _damaged(self._coding, str(error)) from None

    def decoded(self) -> bytes:
        """Return what there is, once it has ended."""
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _step(self) -> None:
        decoder = self._decoder
        fed = b""
        if not decoder.more:
            fed = self._body[self._place : self._place + _FED_AT_ONCE_BYTES]
            self._place += len(fed)
        if part := decoder.decode(fed):
            self.decoded_bytes += len(part)
            self._parts.append(part)
        if self.decoded_bytes > self._most_bytes:
            raise self._too_large()
        if decoder.members > _MOST_MEMBERS:
            raise DamagedError(f"it has more than {_MOST_MEMBERS} members")
        if self._place == len(self._body) and not decoder.more:
            self.ended = True
            if not decoder.whole:
                raise DamagedError("it is cut off")

    def _too_large(self) -> BodyTooLargeError:
        limit = self._limit_bytes
        if self._most_bytes == limit:
            return BodyTooLargeError(f"the decoded request body is longer than {limit} bytes, the longest allowed")
        return BodyTooLargeError(
            f"the request body grows to more than {_MOST_RATIO} times its length when it is decoded"
        )


def _damaged(coding: bytes, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"the request body is not {coding.decode()}: {why}", code="invalid_encoding")
