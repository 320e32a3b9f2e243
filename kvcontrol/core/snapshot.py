"""Reading a peer's ``/kv/v1/snapshot`` slice by slice: it may list millions of blocks, and it may lie.

At first only the head is decoded; the lists of names, nearly all of the body, are found but not read. Then ``slices``
reads them a few at a time, so that whoever takes them can do other things in between. Rejected: decoding the body as
a whole in a thread, since the decoder doesn't let go of the interpreter, and 500,000 blocks are a second of it.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Annotated

import msgspec
from msgspec import Meta

from kvcontrol.core.blocks import CacheIdentity, CacheTier
from kvcontrol.core.errors import UNREADABLE, WireError
from kvcontrol.core.ids import BlockHash, Epoch, Seq
from kvcontrol.core.wire import MAX_HASH_BYTES, MAX_SEQ, MIN_HASH_BYTES

MAX_SNAPSHOT_BYTES = 256 << 20
"""About 3.8 million blocks of 16-byte names with their parents."""

_WINDOW_BYTES = 16_384
_LONGEST_NAME_BYTES = 1_024
_MAX_EPOCH = 256
_MAX_REASON = 200

ResidentSlice = tuple[CacheTier, list[tuple[BlockHash, BlockHash | None]]]
"""Some of what a tier holds: blocks with their parents."""


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    epoch: Annotated[str, Meta(min_length=1, max_length=_MAX_EPOCH)]
    seq: Annotated[int, Meta(ge=-1, le=MAX_SEQ)]
    identity: CacheIdentity
    tiers: dict[CacheTier, msgspec.Raw]
    parents: dict[CacheTier, msgspec.Raw]


_head = msgspec.json.Decoder(_Head)
_texts = msgspec.json.Decoder(list[str])


class SnapshotReader:
    """One snapshot. Raises ``WireError`` when the body is too long, no snapshot, or its head can't be true."""

    def __init__(self, body: bytes) -> None:
        if len(body) > MAX_SNAPSHOT_BYTES:
            raise WireError(f"snapshot is {len(body)} bytes long; at most {MAX_SNAPSHOT_BYTES} are allowed")
        try:
            head = _head.decode(body)
        except UNREADABLE as error:
            known = ", ".join(CacheTier)
            raise WireError(f"snapshot: {str(error)[:_MAX_REASON]}; tiers are {known}") from error
        if head.tiers.keys() != head.parents.keys():
            raise WireError("snapshot: tiers and parents are not of the same tiers")
        self.epoch = Epoch(head.epoch)
        self.seq = Seq(head.seq)
        self.identity = head.identity
        self._head = head

    def slices(self, max_blocks: int) -> Iterator[ResidentSlice]:
        """Yield all blocks in the order of the body, at most ``max_blocks`` at a time.

        Raises ``WireError`` at the first name that isn't hex of ``MIN_HASH_BYTES`` to ``MAX_HASH_BYTES``, block told
        twice in a tier, child told before its parent in the same tier (so no parents make a cycle), or missing parent.
        """
        for tier, raw in self._head.tiers.items():
            order = _Order(tier)
            blocks = _names(raw, f"tiers.{tier}")
            parents = _names(self._head.parents[tier], f"parents.{tier}")
            while True:
                part = list(islice(blocks, max_blocks))
                above = list(islice(parents, max_blocks))
                if len(part) != len(above):
                    raise WireError(f"snapshot: tiers.{tier} and parents.{tier} are not equally long")
                if not part:
                    break
                held = list(zip(part, above, strict=True))
                yield tier, order.checked(held)


class _Order:
    """What a tier's list may go on with."""

    def __init__(self, tier: CacheTier) -> None:
        self._tier = tier
        self._reported: set[BlockHash] = set()
        self._unreported: set[BlockHash] = set()

    def checked(
        self, held: list[tuple[BlockHash | None, BlockHash | None]]
    ) -> list[tuple[BlockHash, BlockHash | None]]:
        reported, unreported = self._reported, self._unreported
        checked: list[tuple[BlockHash, BlockHash | None]] = []
        for block, parent in held:
            if block is None:
                raise WireError(f"snapshot: a block in tiers.{self._tier} has an empty name")
            if parent is not None and parent not in reported:
                unreported.add(parent)
            if block in reported:
                raise WireError(f"snapshot: block {block.hex()} comes twice in tiers.{self._tier}")
            if block in unreported:
                raise WireError(
                    f"snapshot: block {block.hex()} comes after its child in tiers.{self._tier}; parents come first"
                )
            reported.add(block)
            checked.append((block, parent))
        return checked


def _names(raw: msgspec.Raw, where: str) -> Iterator[BlockHash | None]:
    """Yield a JSON array's hex names, None for an empty one."""
    for window in _windows(bytes(raw), where):
        try:
            texts = _texts.decode(window)
        except UNREADABLE as error:
            raise WireError(f"snapshot: {where} is not a list of hex names: {error}") from error
        for text in texts:
            if not text:
                yield None
                continue
            try:
                name = bytes.fromhex(text)
            except ValueError as error:
                raise WireError(f"snapshot: {text[:_MAX_REASON]!r} in {where} is not hex") from error
            if not MIN_HASH_BYTES <= len(name) <= MAX_HASH_BYTES or len(text) != 2 * len(name):
                raise WireError(
                    f"snapshot: a name in {where} is {len(name)} bytes in {len(text)} hex digits; "
                    f"it is of {MIN_HASH_BYTES} to {MAX_HASH_BYTES} bytes without spaces"
                )
            yield BlockHash(name)


def _windows(array: bytes, where: str) -> Iterator[bytes]:
    """Cut a JSON array of strings without commas into smaller arrays; in any other, some piece is no JSON."""
    if not array.startswith(b"["):
        raise WireError(f"snapshot: {where} is no list")
    start, end = 1, len(array) - 1
    while start < end:
        comma = array.find(b",", start + _WINDOW_BYTES, end)
        cut = end if comma < 0 else comma
        if cut - start > _WINDOW_BYTES + _LONGEST_NAME_BYTES:
            raise WireError(f"snapshot: a name in {where} is longer than {_LONGEST_NAME_BYTES} bytes")
        yield b"[" + array[start:cut] + b"]"
        start = cut + 1
