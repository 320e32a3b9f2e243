"""KV events as bytes: the ZMQ/msgpack format that vLLM publishes, so that one subscriber reads every engine.

Live messages are ``[topic, seq, payload]``, seq being 8 bytes big-endian. Replay: the client's DEALER sends
``[b"", first_seq]``; the ROUTER answers ``[b"", seq, payload]`` for each batch that it still has, then
``[b"", END_OF_REPLAY, b""]``.

We publish the map form ``{"type": "BlockStored", ...}`` inside a ``[ts, events, dp_rank]`` batch (vLLM since mid 2026)
and read three shapes: that one, events as arrays (vLLM before, SGLang), and the batch itself as a map. An event that
can't be read is skipped and counted, its neighbours are kept: silent loss is the failure of most subscribers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.errors import WireError
from kvcontrol.core.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvEvent
from kvcontrol.core.ids import BlockHash, Seq

SEQ_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQ_BYTES, "big", signed=True)

_MEDIUM = {
    CacheTier.HBM: "GPU",
    CacheTier.DDR: "CPU",
    CacheTier.NVME: "DISK",
    CacheTier.REMOTE: "REMOTE",
}
_TIER = {medium: tier for tier, medium in _MEDIUM.items()} | {"CPU_PINNED": CacheTier.DDR, "EXTERNAL": CacheTier.REMOTE}
_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
)
_REMOVED_FIELDS = ("block_hashes", "medium")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """A batch as far as it could be read, and one reason for each event that could not."""

    batch: EventBatch
    undecodable: tuple[str, ...] = ()


def encode_seq(seq: Seq) -> bytes:
    """Return the frame that carries a sequence number."""
    return seq.to_bytes(SEQ_BYTES, "big", signed=True)


def decode_seq(frame: bytes) -> Seq:
    """Read a sequence frame; raises ``WireError`` unless it is ``SEQ_BYTES`` long."""
    if len(frame) != SEQ_BYTES:
        raise WireError(f"sequence frame is {len(frame)} bytes long, not {SEQ_BYTES}")
    return Seq(int.from_bytes(frame, "big", signed=True))


def encode_batch(batch: EventBatch) -> bytes:
    """Return the payload frame of a batch."""
    return _encoder.encode([batch.published_at_s, [_to_map(e) for e in batch.events], batch.data_parallel_rank])


def decode_batch(payload: bytes) -> Decoded:
    """Read a payload frame in any of the three shapes; raises ``WireError`` when not even the batch can be read."""
    try:
        raw = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"payload is not msgpack: {error}") from error
    match raw:
        case {"ts": float() | int() as ts, "events": list() as items}:
            rank = raw.get("data_parallel_rank")
        case [float() | int() as ts, list() as items, *rest]:
            rank = rest[0] if rest else None
        case _:
            raise WireError("payload is neither [ts, events, rank] nor {ts, events, data_parallel_rank}")
    events: list[KvEvent] = []
    bad: list[str] = []
    for item in items:
        try:
            events.append(_from_raw(item))
        except WireError as error:
            bad.append(str(error))
    batch = EventBatch(
        published_at_s=float(ts),
        events=tuple(events),
        data_parallel_rank=rank if isinstance(rank, int) else None,
    )
    return Decoded(batch=batch, undecodable=tuple(bad))


def _to_map(event: KvEvent) -> dict[str, Any]:
    match event:
        case BlockStored():
            return {
                "type": "BlockStored",
                "block_hashes": event.block_hashes,
                "parent_block_hash": event.parent,
                "token_ids": event.token_ids,
                "block_size": event.block_size_tokens,
                "lora_id": None,
                "medium": _MEDIUM[event.tier],
                "lora_name": event.adapter or None,
            }
        case BlockRemoved():
            return {"type": "BlockRemoved", "block_hashes": event.block_hashes, "medium": _MEDIUM[event.tier]}
        case AllBlocksCleared():
            return {"type": "AllBlocksCleared"}


def _from_raw(item: object) -> KvEvent:
    kind: object
    fields: Mapping[str, Any]
    match item:
        case {"type": kind}:
            fields = cast("Mapping[str, Any]", item)
        case [str() as kind, *values]:
            names: Sequence[str] = {"BlockStored": _STORED_FIELDS, "BlockRemoved": _REMOVED_FIELDS}.get(kind, ())
            fields = dict(zip(names, values, strict=False))
        case _:
            raise WireError("event is neither a map with a type nor an array that starts with one")
    match kind:
        case "BlockStored":
            return _stored(fields)
        case "BlockRemoved":
            return BlockRemoved(block_hashes=_hashes(fields), tier=_tier(fields))
        case "AllBlocksCleared":
            return AllBlocksCleared()
        case _:
            raise WireError(f"unknown event type {kind!r}")


def _stored(fields: Mapping[str, Any]) -> BlockStored:
    hashes = _hashes(fields)
    size = fields.get("block_size")
    if not isinstance(size, int) or size <= 0:
        raise WireError(f"BlockStored.block_size is {size!r}, not a positive integer")
    tokens = fields.get("token_ids") or []
    if not isinstance(tokens, list) or not all(isinstance(t, int) for t in tokens):
        raise WireError("BlockStored.token_ids is not a list of integers")
    if tokens and len(tokens) != size * len(hashes):
        raise WireError(f"BlockStored has {len(tokens)} tokens for {len(hashes)} blocks of {size}")
    parent = fields.get("parent_block_hash")
    adapter = fields.get("lora_name")
    return BlockStored(
        block_hashes=hashes,
        parent=None if parent is None else _hash(parent),
        token_ids=tuple(tokens),
        block_size_tokens=size,
        tier=_tier(fields),
        adapter=adapter if isinstance(adapter, str) else "",
    )


def _hashes(fields: Mapping[str, Any]) -> tuple[BlockHash, ...]:
    raw = fields.get("block_hashes")
    if not isinstance(raw, list) or not raw:
        raise WireError("block_hashes is missing or empty")
    return tuple(_hash(item) for item in raw)


def _hash(raw: object) -> BlockHash:
    """An engine's hash as an opaque key: bytes as they are, an int (vLLM's 64-bit form) as 8 bytes big-endian."""
    match raw:
        case bytes():
            return BlockHash(raw)
        case int() if -(2**63) <= raw < 2**64:
            return BlockHash((raw % 2**64).to_bytes(8, "big"))
        case _:
            raise WireError(f"block hash is a {type(raw).__name__}, not bytes or a 64-bit integer")


def _tier(fields: Mapping[str, Any]) -> CacheTier:
    medium = fields.get("medium")
    if medium is None:
        return CacheTier.HBM
    tier = _TIER.get(medium.upper()) if isinstance(medium, str) else None
    if tier is None:
        raise WireError(f"medium is {medium!r}; known are {', '.join(sorted(_TIER))}")
    return tier


__all__ = ["END_OF_REPLAY", "Decoded", "decode_batch", "decode_seq", "encode_batch", "encode_seq"]
