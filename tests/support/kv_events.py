"""Asking an instance about its KV events, as a gateway would; and what a prompt's blocks must be called."""

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvcontrol.core.blocks import CacheIdentity, CacheTier
from kvcontrol.core.control import SNAPSHOT_PATH, STATS_PATH, InstanceStats, Snapshot
from kvcontrol.core.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from kvcontrol.core.hashing import chain_hashes, root_hash, token_bytes
from kvcontrol.core.ids import BlockHash, Seq
from kvcontrol.core.wire import END_OF_REPLAY, decode_batch, decode_seq, encode_seq

WITHIN_S = 120.0


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: Any
    raw: bytes = field(repr=False)


def get(url: str, *, timeout_s: float = WITHIN_S) -> Answer:
    return answer_to(urllib.request.Request(url), timeout_s)  # noqa: S310 - our own


def post(url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Answer:
    request = urllib.request.Request(  # noqa: S310 - our own
        url, json.dumps(body).encode(), {"content-type": "application/json", **(headers or {})}
    )
    return answer_to(request, WITHIN_S)


def answer_to(request: urllib.request.Request, timeout_s: float) -> Answer:
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:  # noqa: S310 - our own
            status, raw = response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            status, raw = error.code, error.read()
    try:
        return Answer(status, json.loads(raw), raw)
    except ValueError:
        return Answer(status, None, raw)


def stats(url: str) -> InstanceStats:
    answer = get(url + STATS_PATH)
    assert answer.status == 200, answer
    return msgspec.json.decode(answer.raw, type=InstanceStats)


def snapshot(url: str) -> Snapshot:
    answer = get(url + SNAPSHOT_PATH)
    assert answer.status == 200, answer
    return msgspec.json.decode(answer.raw, type=Snapshot)


def replay(endpoint: str, first: int = 0) -> list[tuple[Seq, tuple[KvEvent, ...]]]:
    """Every batch that the instance still has, from ``first`` on."""
    batches = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint)
        dealer.send_multipart((b"", encode_seq(Seq(first))))
        while True:
            assert dealer.poll(WITHIN_S * 1000), "no answer to a replay request"
            _, seq, payload = dealer.recv_multipart()
            if seq == END_OF_REPLAY:
                return batches
            decoded = decode_batch(payload)
            assert not decoded.undecodable
            batches.append((decode_seq(seq), decoded.batch.events))


def held_after(batches: Sequence[tuple[Seq, tuple[KvEvent, ...]]]) -> set[BlockHash]:
    """What a subscriber that applied ``batches`` believes to be resident."""
    held: set[BlockHash] = set()
    for _, events in batches:
        for event in events:
            match event:
                case BlockStored():
                    held.update(event.block_hashes)
                case BlockRemoved():
                    held.difference_update(event.block_hashes)
                case AllBlocksCleared():
                    held.clear()
    return held


def held_by_tier(batches: Sequence[tuple[Seq, tuple[KvEvent, ...]]]) -> dict[CacheTier, set[BlockHash]]:
    """What a subscriber that applied ``batches`` believes to be where; tiers that hold nothing are left out."""
    held: dict[CacheTier, set[BlockHash]] = {tier: set() for tier in CacheTier}
    for _, events in batches:
        for event in events:
            match event:
                case BlockStored():
                    held[event.tier].update(event.block_hashes)
                case BlockRemoved():
                    held[event.tier].difference_update(event.block_hashes)
                case AllBlocksCleared():
                    for blocks in held.values():
                        blocks.clear()
    return {tier: blocks for tier, blocks in held.items() if blocks}


def hbm(state: Snapshot) -> set[BlockHash]:
    return set(state.hashes(CacheTier.HBM))


def block_names(identity: CacheIdentity, tokens: Sequence[int], *, salt: str = "") -> list[BlockHash]:
    return chain_hashes(root_hash(identity, salt=salt), token_bytes(tokens), identity.block_size_tokens)


def chat_tokens(model: Path, text: str) -> list[int]:
    """What one user message becomes: chat template, then tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    return [int(token) for token in tokenizer.encode(rendered)]
