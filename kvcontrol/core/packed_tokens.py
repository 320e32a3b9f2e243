"""Token ids that stay packed: a prompt of 100,000 tokens need not become as many Python integers to be passed on."""

import struct
from collections.abc import Iterator, Sequence
from typing import Final, overload

from kvcontrol.core.hashing import TOKEN_BYTES

_UINT32: Final = 0xCE
_ARRAY32: Final = b"\xdd"
_ITEM_BYTES: Final = 1 + TOKEN_BYTES


class PackedTokens(Sequence[int]):
    """Token ids over their little-endian u32 (``hashing.token_bytes``); equal to any tuple or list of the same ids.

    ``ValueError`` for bytes that are no whole number of tokens.
    """

    __slots__ = ("packed",)

    def __init__(self, packed: bytes) -> None:
        if len(packed) % TOKEN_BYTES:
            raise ValueError(f"{len(packed)} bytes of tokens; it must be a multiple of {TOKEN_BYTES}")
        self.packed = packed

    def __len__(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    def __iter__(self) -> Iterator[int]:
        return iter(self.unpacked())

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[int, ...]: ...
    def __getitem__(self, place: int | slice) -> int | tuple[int, ...]:
        return self.unpacked()[place]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedTokens):
            return self.packed == other.packed
        return self.unpacked() == tuple(other) if isinstance(other, (tuple, list)) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.unpacked())

    def __repr__(self) -> str:
        return f"PackedTokens({list(self.unpacked())})"

    def unpacked(self) -> tuple[int, ...]:
        """Return the ids; O(n)."""
        return struct.unpack(f"<{len(self)}I", self.packed)

    def msgpack(self) -> bytes:
        """Return them as an array in msgpack, each a 32-bit integer whatever its size; O(n), without one Python
        object a token.
        """
        packed, count = self.packed, len(self)
        items = bytearray(_ITEM_BYTES * count)
        items[0::_ITEM_BYTES] = bytes([_UINT32]) * count
        for place in range(TOKEN_BYTES):  # big-endian
            items[1 + place :: _ITEM_BYTES] = packed[TOKEN_BYTES - 1 - place :: TOKEN_BYTES]
        return _ARRAY32 + count.to_bytes(4, "big") + items
