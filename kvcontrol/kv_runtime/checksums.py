"""Checksums of arena slots, many at a time: by one native call where it can be had, else one by one."""

import ctypes
import logging
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from typing import Final

from kvcontrol.kv_runtime.arena import HostArena
from kvcontrol.kv_runtime.errors import NativeError
from kvcontrol.kv_runtime.native import Native, native
from kvcontrol.kv_runtime.record import checksum

Checksums = Callable[[HostArena, Sequence[int]], list[int]]
"""The checksums (``record.checksum``) of an arena's slots, in order; any thread."""

_PROBE: Final = bytes(range(256)) * 5

_log = logging.getLogger(__name__)


def one_by_one(arena: HostArena, slots: Sequence[int]) -> list[int]:
    """Compute them in Python; see ``Checksums``. ``IndexError`` for a slot that isn't there."""
    return [checksum(arena.view(slot)) for slot in slots]


class NativeChecksums:
    """A ``Checksums`` that is one native call without the GIL."""

    def __init__(self, helper: Native) -> None:
        self._helper = helper

    def __call__(self, arena: HostArena, slots: Sequence[int]) -> list[int]:
        if slots and not (min(slots) >= 0 and max(slots) < arena.slots):
            raise IndexError(f"slots {min(slots)} to {max(slots)} of an arena with {arena.slots}")
        pitch = arena.pitch_bytes
        with arena.whole():  # the memory can't be given back meanwhile
            return self._sums(arena.address, array("Q", [slot * pitch for slot in slots]), arena.block_bytes)

    def of_bytes(self, data: bytes) -> int:
        """Return one buffer's."""
        address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
        return self._sums(address, array("Q", [0]), len(data))[0]

    def _sums(self, address: int, offsets: "array[int]", size_bytes: int) -> list[int]:
        sums = array("Q", bytes(offsets.itemsize * len(offsets)))
        place, found = offsets.buffer_info()[0], sums.buffer_info()[0]
        self._helper.checksums(self._helper.hash, address, place, len(offsets), size_bytes, found)
        return sums.tolist()


@cache
def fastest() -> Checksums:
    """Return the native checksum if it is available and equals xxhash's; otherwise log the reason once."""
    try:
        found = NativeChecksums(native())
    except NativeError as error:
        problem = str(error)
    else:
        if found.of_bytes(_PROBE) == checksum(_PROBE):
            return found
        problem = "it computes something else than the xxhash package"
    _log.warning("blocks are verified one by one, which is slower; native helper unavailable: %s", problem)
    return one_by_one
