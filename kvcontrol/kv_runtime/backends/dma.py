"""A transfer as a list of strided copies, in the layout that CUDA takes as one batch.

One operation moves one block's pieces in one stack of rows: ``height`` lines of ``width`` bytes, at the rows' pitch in
the engine's memory and one after the other in the arena. Measured against seven other ways, this one reaches 96-97 % of
the link from 16 blocks on, and takes no staging memory and no SM from the engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
    """Return the copies of a transfer, one for each move and stack. About 30 us for 255 moves."""
    slots = np.fromiter((move.slot for move in moves), np.uint64, len(moves))
    hosts = np.fromiter((move.host for move in moves), np.uint64, len(moves))
    made = np.zeros((len(stacks), len(moves)), OPERATION)
    engine_side, host_side = ("source", "target") if to_host else ("target", "source")
    for stack, ops in zip(stacks, made, strict=True):
        inside, outside = ops[engine_side], ops[host_side]
        inside["address"] = np.uint64(stack.address) + slots * np.uint64(stack.piece_bytes)
        inside["pitch"] = stack.pitch_bytes
        outside["address"] = np.uint64(host.address + stack.offset_bytes) + hosts * np.uint64(host.pitch_bytes)
        outside["pitch"] = stack.piece_bytes
        for side in (inside, outside):
            side["type"] = _OPERAND_POINTER
            side["height"] = stack.rows
        ops["width"] = stack.piece_bytes
        ops["height"] = stack.rows
    made["depth"] = 1
    made["source_access_order"] = _ACCESS_IN_STREAM_ORDER
    return made.reshape(-1)


__all__ = ["OPERATION", "HostSlots", "Operations", "Stack", "operations"]
