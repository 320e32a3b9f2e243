"""A transfer as a list of strided copies, in the layout that CUDA takes as one batch.

One operation moves one block's pieces in one stack of rows: ``height`` lines of ``width`` bytes, at the rows' pitch in
the engine's memory and one after the other in the arena. Measured against seven other ways, this one reaches 96-97 % of
the link from 16 blocks on, and takes no staging memory and no SM from the engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvcontrol.kv_runtime.backend_protocol import Move

_OPERAND = [
    ("type", "<i4"),
    ("_", "<i4"),
    ("address", "<u8"),
    ("pitch", "<u8"),
    ("height", "<u8"),
    ("location_type", "<i4"),
    ("location_id", "<i4"),
]
_OPERAND_POINTER = 1
_ACCESS_IN_STREAM_ORDER = 1

OPERATION = np.dtype(
    [
        ("source", _OPERAND),
        ("target", _OPERAND),
        ("width", "<u8"),
        ("height", "<u8"),
        ("depth", "<u8"),
        ("source_access_order", "<i4"),
        ("flags", "<u4"),
    ]
)
"""``struct cudaMemcpy3DBatchOp`` with both operands pointers: 112 bytes."""

Operations = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """``rows`` rows that follow each other at ``pitch_bytes`` from ``address`` on.

    Block ``n`` is ``piece_bytes`` of each, from ``n * piece_bytes`` on; its pieces lie ``offset_bytes`` into an arena
    slot.
    """

    address: int
    rows: int
    pitch_bytes: int
    piece_bytes: int
    offset_bytes: int

    def split(self) -> list["Stack"]:
        """Return the rows one by one."""
        return [
            Stack(
                address=self.address + row * self.pitch_bytes,
                rows=1,
                pitch_bytes=self.piece_bytes,
                piece_bytes=self.piece_bytes,
                offset_bytes=self.offset_bytes + row * self.piece_bytes,
            )
            for row in range(self.rows)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSlots:
    """Where an arena's slots lie: slot ``n`` at ``address + n * pitch_bytes``."""

    address: int
    pitch_bytes: int


def operations(stacks: Sequence[Stack], moves: Sequence[Move], host: HostSlots, *, to_host: bool) -> Operations:
    """Return the copies of a transfer, one for each move and stack: all moves of the first stack, then of the next."""
    places = np.array([(slot, at) for slot, at, _ in moves], dtype=np.uint64).reshape(-1, 2)
    template = _template(tuple(stacks), to_host)
    made = np.repeat(template, len(places)).reshape(len(stacks), len(places))
    engine_side, host_side = ("source", "target") if to_host else ("target", "source")
    inside, outside = made[engine_side]["address"], made[host_side]["address"]
    for row, stack in enumerate(stacks):
        inside[row] = np.uint64(stack.address) + places[:, 0] * np.uint64(stack.piece_bytes)
        outside[row] = np.uint64(host.address + stack.offset_bytes) + places[:, 1] * np.uint64(host.pitch_bytes)
    return made.reshape(-1)


@lru_cache(maxsize=8)
def _template(stacks: tuple[Stack, ...], to_host: bool) -> Operations:  # noqa: FBT001 - a key of the cache
    """The common part of all copies of a stack: everything but the addresses."""
    made = np.zeros(len(stacks), OPERATION)
    engine_side, host_side = ("source", "target") if to_host else ("target", "source")
    for op, stack in zip(made, stacks, strict=True):
        op[engine_side]["pitch"] = stack.pitch_bytes
        op[host_side]["pitch"] = stack.piece_bytes
        for side in (engine_side, host_side):
            op[side]["type"] = _OPERAND_POINTER
            op[side]["height"] = stack.rows
        op["width"] = stack.piece_bytes
        op["height"] = stack.rows
    made["depth"] = 1
    made["source_access_order"] = _ACCESS_IN_STREAM_ORDER
    return made
