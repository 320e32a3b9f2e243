"""KV events as bytes: the ZMQ/msgpack format that vLLM publishes, so that one subscriber reads every engine.

Live messages are ``[topic, seq, payload]``, seq being 8 bytes big-endian. Replay: the client's DEALER sends
``[b"", first_seq]``; the ROUTER answers ``[b"", seq, payload]`` for each batch that it still has, then
``[b"", END_OF_REPLAY, b""]``.

We publish the map form ``{"type": "BlockStored", ...}`` inside a ``[ts, events, dp_rank]`` batch (vLLM since mid 2026)
and read three shapes: that one, events as arrays (vLLM before, SGLang), and the batch itself as a map. An event that
can't be read is named apart from its neighbours: silent loss is the failure of most subscribers.

What is read is believed by routing, so it is checked here, against the limits below and for chains that bite their own
tail. The payload is decoded straight into typed fields and everything else is skipped unread: a hostile one costs time
in proportion to its length, and memory in proportion to what it really contains, whatever its headers claim. Tokens are
the largest part of it: their number is read off their header and must be right before any of them is read, and who
doesn't need them leaves them unread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.errors import UNREADABLE, WireError
from kvcontrol.core.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvEvent
from kvcontrol.core.ids import BlockHash, Seq
from kvcontrol.core.packed_tokens import PackedTokens

SEQ_BYTES = 8
MAX_SEQ = 2**53 - 1
"""The largest number of a batch: a thousand a second for 285,000 years, and exact in JSON."""
END_OF_REPLAY = (-1).to_bytes(SEQ_BYTES, "big", signed=True)
MIN_HASH_BYTES = 8
MAX_HASH_BYTES = 32
"""Engines name blocks by 8 bytes (or a 64-bit integer), 16 or 32."""
MAX_BLOCK_SIZE_TOKENS = 65_536
MAX_PAYLOAD_BYTES = 8 << 20
"""Our own batches have 4,096 blocks: 1 MB with 64 tokens a block, 6 MB with 256 large ones."""
MAX_BATCH_EVENTS = 65_536
MAX_BATCH_BLOCKS = 1 << 17
"""Blocks named by all events of a batch together."""
MAX_EVENT_TOKENS = 1 << 21
MAX_UNDECODABLE = 64
"""Events of a batch that are named one by one; a batch with more is refused as a whole."""

_MAX_RANK = 65_535
_MAX_WORD = 256
_MAX_REASON = 200

_MEDIUM = {
    CacheTier.HBM: "GPU",
    CacheTier.DDR: "CPU",
    CacheTier.NVME: "DISK",
    CacheTier.REMOTE: "REMOTE",
}
_TIER = {medium: tier for tier, medium in _MEDIUM.items()} | {"CPU_PINNED": CacheTier.DDR, "EXTERNAL": CacheTier.REMOTE}

_Name = Annotated[bytes, Meta(min_length=MIN_HASH_BYTES, max_length=MAX_HASH_BYTES)] | int
_Names = Annotated[list[_Name], Meta(min_length=1, max_length=MAX_BATCH_BLOCKS)]
_Token = Annotated[int, Meta(ge=0, lt=2**32)]
_Word = Annotated[str, Meta(max_length=_MAX_WORD)]


class _StoredFields(msgspec.Struct):
    """In the order of the array form."""

    block_hashes: _Names
    parent_block_hash: _Name | None = None
    token_ids: msgspec.Raw = msgspec.Raw()
    block_size: Annotated[int, Meta(ge=1, le=MAX_BLOCK_SIZE_TOKENS)] | UnsetType = UNSET
    lora_id: msgspec.Raw = msgspec.Raw()
    medium: _Word | None = None
    lora_name: _Word | None = None


class _RemovedFields(msgspec.Struct):
    block_hashes: _Names
    medium: _Word | None = None


class _StoredMap(_StoredFields, tag="BlockStored", tag_field="type"): ...


class _RemovedMap(_RemovedFields, tag="BlockRemoved", tag_field="type"): ...


class _ClearedMap(msgspec.Struct, tag="AllBlocksCleared", tag_field="type"): ...


class _StoredArray(_StoredFields, tag="BlockStored", array_like=True): ...


class _RemovedArray(_RemovedFields, tag="BlockRemoved", array_like=True): ...


class _ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True): ...


_Fields = _StoredFields | _RemovedFields | _ClearedMap | _ClearedArray
_Events = Annotated[list[msgspec.Raw], Meta(max_length=MAX_BATCH_EVENTS)]
_Rank = Annotated[int, Meta(ge=0, le=_MAX_RANK)]


class _BatchArray(msgspec.Struct, array_like=True):
    ts: float
    events: _Events
    data_parallel_rank: _Rank | None = None


class _BatchMap(msgspec.Struct):
    ts: float
    events: _Events
    data_parallel_rank: _Rank | None = None


_T = TypeVar("_T")

_encoder = msgspec.msgpack.Encoder()
_batch_array = msgspec.msgpack.Decoder(_BatchArray)
_batch_map = msgspec.msgpack.Decoder(_BatchMap)
_tokens = msgspec.msgpack.Decoder(list[_Token])
_event_array = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_event_map = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """A batch as far as it could be read, and one reason for each event that could not."""

    batch: EventBatch
    undecodable: tuple[str, ...] = ()


def encode_seq(seq: Seq) -> bytes:
    """Return the frame that carries a sequence number."""
    return seq.to_bytes(SEQ_BYTES, "big", signed=True)


def decode_seq(frame: bytes) -> Seq:
    """Read a batch's number; raises ``WireError`` unless it is ``SEQ_BYTES`` long and from 0 to ``MAX_SEQ``.

    ``END_OF_REPLAY`` is no number: compare with it first.
    """
    if len(frame) != SEQ_BYTES:
        raise WireError(f"sequence frame is {len(frame)} bytes long, not {SEQ_BYTES}")
    seq = int.from_bytes(frame, "big", signed=True)
    if not 0 <= seq <= MAX_SEQ:
        raise WireError(f"sequence number is {seq}; it is from 0 to {MAX_SEQ}")
    return Seq(seq)


def encode_batch(batch: EventBatch) -> bytes:
    """Return the payload frame of a batch."""
    return _encoder.encode([batch.published_at_s, [_to_map(e) for e in batch.events], batch.data_parallel_rank])


def decode_batch(payload: bytes, *, with_tokens: bool = True) -> Decoded:
    """Read a payload frame in any of the three shapes; stored events have no tokens unless ``with_tokens``.

    Raises ``WireError`` when not even the batch can be read, when it names more than ``MAX_BATCH_BLOCKS`` blocks, and
    when more than ``MAX_UNDECODABLE`` of its events can't be read.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise WireError(f"payload is {len(payload)} bytes long; at most {MAX_PAYLOAD_BYTES} are allowed")
    raw: _BatchMap | _BatchArray
    if _is_map(payload):
        raw = _typed(_batch_map, payload, "payload is no {ts, events, data_parallel_rank}")
    elif _is_array(payload):
        raw = _typed(_batch_array, payload, "payload is no [ts, events, rank]")
    else:
        raise WireError("payload is neither [ts, events, rank] nor {ts, events, data_parallel_rank} in msgpack")
    if not isfinite(raw.ts):
        raise WireError(f"batch.ts is {raw.ts}; it is a Unix time in seconds")
    events: list[KvEvent] = []
    bad: list[str] = []
    blocks = 0
    for item in raw.events:
        try:
            fields = _fields(item)
            blocks += len(fields.block_hashes) if isinstance(fields, (_StoredFields, _RemovedFields)) else 0
            if blocks <= MAX_BATCH_BLOCKS:
                events.append(_event(fields, with_tokens=with_tokens))
        except WireError as error:
            bad.append(str(error))
        if blocks > MAX_BATCH_BLOCKS:
            raise WireError(f"batch names more than {MAX_BATCH_BLOCKS} blocks")
        if len(bad) > MAX_UNDECODABLE:
            raise WireError(f"more than {MAX_UNDECODABLE} events can't be read; the first: {bad[0]}")
    batch = EventBatch(published_at_s=raw.ts, events=tuple(events), data_parallel_rank=raw.data_parallel_rank)
    return Decoded(batch=batch, undecodable=tuple(bad))


def _is_map(data: bytes | msgspec.Raw) -> bool:
    first = memoryview(data)[:1].tobytes()
    return b"\x80" <= first <= b"\x8f" or first in {b"\xde", b"\xdf"}


def _is_array(data: bytes | msgspec.Raw) -> bool:
    first = memoryview(data)[:1].tobytes()
    return b"\x90" <= first <= b"\x9f" or first in {b"\xdc", b"\xdd"}


def _typed(decoder: msgspec.msgpack.Decoder[_T], data: bytes | msgspec.Raw, problem: str) -> _T:
    try:
        return decoder.decode(data)
    except UNREADABLE as error:
        raise WireError(f"{problem}: {str(error)[:_MAX_REASON]}") from error


def _to_map(event: KvEvent) -> dict[str, Any]:
    match event:
        case BlockStored():
            return {
                "type": "BlockStored",
                "block_hashes": event.block_hashes,
                "parent_block_hash": event.parent,
                "token_ids": _encoded(event.token_ids),
                "block_size": event.block_size_tokens,
                "lora_id": None,
                "medium": _MEDIUM[event.tier],
                "lora_name": event.adapter or None,
            }
        case BlockRemoved():
            return {"type": "BlockRemoved", "block_hashes": event.block_hashes, "medium": _MEDIUM[event.tier]}
        case AllBlocksCleared():
            return {"type": "AllBlocksCleared"}


def _encoded(tokens: Sequence[int]) -> Sequence[int] | msgspec.Raw:
    return msgspec.Raw(tokens.msgpack()) if isinstance(tokens, PackedTokens) else tokens


def _fields(item: msgspec.Raw) -> _Fields:
    problem = "event is no BlockStored, BlockRemoved or AllBlocksCleared"
    fields: _Fields
    if _is_map(item):
        fields = _typed(_event_map, item, problem)
    elif _is_array(item):
        fields = _typed(_event_array, item, problem)
    else:
        raise WireError("event is neither a map with a type nor an array that starts with one")
    return fields


def _event(event: _Fields, *, with_tokens: bool) -> KvEvent:
    match event:
        case _StoredFields():
            return _stored(event, with_tokens=with_tokens)
        case _RemovedFields():
            return BlockRemoved(block_hashes=_hashes(event.block_hashes), tier=_tier(event.medium))
        case _:
            return AllBlocksCleared()


def _stored(event: _StoredFields, *, with_tokens: bool) -> BlockStored:
    hashes = _hashes(event.block_hashes)
    size = event.block_size
    if size is UNSET:
        raise WireError(f"BlockStored.block_size is missing; it is from 1 to {MAX_BLOCK_SIZE_TOKENS}")
    tokens = _length(event.token_ids)
    if tokens and tokens != size * len(hashes):
        raise WireError(f"BlockStored has {tokens} tokens for {len(hashes)} blocks of {size}")
    if tokens > MAX_EVENT_TOKENS:
        raise WireError(f"BlockStored has {tokens} tokens; at most {MAX_EVENT_TOKENS} are allowed")
    parent = None if event.parent_block_hash is None else _hash(event.parent_block_hash)
    chain = set(hashes)
    if len(chain) != len(hashes) or parent in chain:
        raise WireError("BlockStored.block_hashes has a block twice, or its own parent: a chain has no cycle")
    return BlockStored(
        block_hashes=hashes,
        parent=parent,
        token_ids=_token_ids(event.token_ids) if tokens and with_tokens else (),
        block_size_tokens=size,
        tier=_tier(event.medium),
        adapter=event.lora_name or "",
    )


def _length(tokens: msgspec.Raw) -> int:
    """Return how many tokens a list in msgpack has, by its header; 0 for none."""
    head = bytes(memoryview(tokens)[:5])
    match head[:1]:
        case b"" | b"\xc0":
            return 0
        case b"\xdc":
            return int.from_bytes(head[1:3], "big")
        case b"\xdd":
            return int.from_bytes(head[1:5], "big")
        case kind if 0x90 <= kind[0] <= 0x9F:  # noqa: PLR2004 - msgpack's short lists
            return kind[0] & 0x0F
    raise WireError("BlockStored.token_ids is no list")


def _token_ids(tokens: msgspec.Raw) -> tuple[int, ...]:
    ids: list[int] = _typed(_tokens, tokens, "BlockStored.token_ids")
    return tuple(ids)


def _hashes(names: list[bytes | int]) -> tuple[BlockHash, ...]:
    return tuple([_hash(name) for name in names])


def _hash(name: bytes | int) -> BlockHash:
    """An engine's hash as an opaque key: bytes as they are, an int (vLLM's 64-bit form) as 8 bytes big-endian."""
    return BlockHash(name if isinstance(name, bytes) else (name % 2**64).to_bytes(8, "big"))


def _tier(medium: str | None) -> CacheTier:
    if medium is None:
        return CacheTier.HBM
    tier = _TIER.get(medium.upper())
    if tier is None:
        raise WireError(f"medium is {medium!r}; known are {', '.join(sorted(_TIER))}")
    return tier
