"""gzip and deflate in steps with bounded output."""

import zlib
from typing import Final

MOST_AT_ONCE_BYTES: Final = 1 << 20
_ANY_HEADER: Final = 47  # zlib's word for: gzip or zlib, as its header says
_NO_HEADER: Final = -15
_GZIP_MAGIC: Final = b"\x1f\x8b"
_HEADER_BYTES: Final = 2
_READ_AT_ONCE_BYTES: Final = 4 << 10


class DamagedError(Exception):
    """The bytes are not of this encoding."""


class Inflate:
    """Bytes of one or more members in, what they hold out. With ``may_be_raw`` they may have no header: some clients
    send ``deflate`` so.
    """

    def __init__(self, *, may_be_raw: bool = False) -> None:
        self._bits = _ANY_HEADER
        self._may_be_raw = may_be_raw
        self._inflate = zlib.decompressobj(wbits=self._bits)
        self._left = b""
        self._full = False
        self._begun = False
        self.members = 0
        """How many have begun."""

    @property
    def more(self) -> bool:
        """Whether ``decode`` may give more without new data."""
        return self._full or bool(self._left)

    @property
    def whole(self) -> bool:
        """Whether all that came was given out, and nothing is missing."""
        return not self.more and (self._inflate.eof or not self._begun)

    def decode(self, data: bytes = b"") -> bytes:
        """Return what these bytes and those before hold, at most ``MOST_AT_ONCE_BYTES`` of it.

        By small pieces: at the end of each member zlib copies what is left of the piece that it was given, and hostile
        members are 20 bytes long. Raises ``DamagedError``.
        """
        if not self._begun:
            self._begun, self.members = True, 1
            if self._may_be_raw and not _has_header(data):
                self._bits = _NO_HEADER
                self._inflate = zlib.decompressobj(wbits=self._bits)
        left = self._left + data
        view, place, budget = memoryview(left), 0, MOST_AT_ONCE_BYTES
        parts: list[bytes] = []
        try:
            while budget > 0:
                if self._inflate.eof:
                    if place == len(left):
                        break
                    self._inflate = zlib.decompressobj(wbits=self._bits)
                    self.members += 1
                inflate, piece = self._inflate, view[place : place + _READ_AT_ONCE_BYTES]
                parts.append(inflate.decompress(piece, budget))
                budget -= len(parts[-1])
                place += len(piece) - len(inflate.unused_data if inflate.eof else inflate.unconsumed_tail)
                if place == len(left):
                    break
        except zlib.error as error:
            raise DamagedError(str(error)) from error
        self._full = budget == 0 and not self._inflate.eof
        self._left = left[place:]
        return b"".join(parts)


def _has_header(data: bytes) -> bool:
    """Whether data begins as gzip does, or as zlib (RFC 1950: method 8, and a multiple of 31 with its flags)."""
    head = data[:_HEADER_BYTES]
    return head == _GZIP_MAGIC or (
        len(head) == _HEADER_BYTES and head[0] & 0x0F == zlib.DEFLATED and int.from_bytes(head) % 31 == 0
    )
