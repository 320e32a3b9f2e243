"""Look-ups in a fleet's residency index: who holds the longest beginning of a prompt?

The index is filled with ``blocks`` held blocks over ``instances`` instances: conversations of 188 or 2,048 blocks, each
on one instance, all behind a system prompt of 16 blocks that every instance holds. Looked up are whole conversations
(hits), conversations with a new second half (partial hits) and unknown prompts (misses), with their hashes given. The
naive index answers the same questions beside it. ``lookup`` is the match alone, whose answers are worked out for the
instances that are asked for; ``every_answer`` asks for all of them, as the naive index always does.
"""

import random
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvcontrol.core import BlockHash, BlockRemoved, BlockStored, InstanceId
from kvcontrol.prefix_reuse.benchmarks.timing import each_s, no_collection, quantile
from kvcontrol.prefix_reuse.fleet import FleetIndex
from kvcontrol.prefix_reuse.match import ResidencyIndex
from kvcontrol.prefix_reuse.naive import NaiveFleetIndex

_LENGTHS = (188, 2_048)
_SYSTEM_BLOCKS = 16
_BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """How much is held, by how many, and how many look-ups of each kind are timed."""

    blocks: int = 1_000_000
    instances: int = 64
    lookups: int = 2_000
    naive_lookups: int = 50
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Conversation:
    instance: InstanceId
    hashes: Sequence[BlockHash]

    def stored(self) -> BlockStored:
        return BlockStored(block_hashes=tuple(self.hashes), parent=None, token_ids=(), block_size_tokens=_BLOCK_TOKENS)


def run(plan: FleetPlan) -> dict[str, float]:
    """Return metrics by name, with their unit in it."""
    rng = random.Random(plan.seed)  # noqa: S311 - reproducible, not secret
    talks = _conversations(plan, rng)
    metrics = _memory(talks)
    index, naive = FleetIndex(), NaiveFleetIndex()
    metrics["events_per_s"] = _fill(index, talks)
    _fill(naive, talks)
    for length in _LENGTHS:
        whole = [talk for talk in talks if len(talk.hashes) == length]
        hits = [rng.choice(whole).hashes for _ in range(plan.lookups)]
        metrics |= _lookups(f"lookup_{length}", index, hits)
        metrics |= _lookups(f"lookup_partial_{length}", index, [_continued(prompt, rng) for prompt in hits])
        metrics |= _lookups(f"lookup_miss_{length}", index, [_unknown(length, rng) for _ in range(plan.lookups)])
        beside = hits[: plan.naive_lookups]
        all_s = each_s(hits, lambda prompt: dict(index.match(prompt)))
        metrics[f"lookup_{length}_every_answer_p50_us"] = quantile(all_s, 0.5) * 1e6
        naive_p50_s = quantile(each_s(beside, naive.match, warm_up=2), 0.5)
        metrics[f"naive_lookup_{length}_p50_us"] = naive_p50_s * 1e6
        metrics[f"naive_over_every_answer_{length}_ratio"] = naive_p50_s / quantile(all_s, 0.5)
    metrics |= _lookups("lookup_1", index, [rng.choice(talks).hashes[:1] for _ in range(plan.lookups)])
    metrics["removals_per_s"] = _empty(index, talks)
    metrics |= _alone(plan, rng)
    return metrics


def _alone(plan: FleetPlan, rng: random.Random) -> dict[str, float]:
    """The same hits with one instance that holds a tenth of the blocks."""
    index = FleetIndex()
    talks = _conversations(replace(plan, blocks=plan.blocks // 10, instances=1), rng)
    for talk in talks:
        index.apply(talk.instance, talk.stored())
    metrics: dict[str, float] = {}
    for length in _LENGTHS:
        whole = [talk.hashes for talk in talks if len(talk.hashes) == length]
        metrics |= _lookups(f"lookup_{length}_one_instance", index, rng.choices(whole, k=plan.lookups))
    return metrics


def _conversations(plan: FleetPlan, rng: random.Random) -> list[_Conversation]:
    system = [_block(rng) for _ in range(_SYSTEM_BLOCKS)]
    talks: list[_Conversation] = []
    held = 0
    while held < plan.blocks:
        length = _LENGTHS[len(talks) // plan.instances % len(_LENGTHS)]
        own = [_block(rng) for _ in range(length - _SYSTEM_BLOCKS)]
        instance = InstanceId(f"engine-{len(talks) % plan.instances}")
        talks.append(_Conversation(instance=instance, hashes=[*system, *own]))
        held += length - _SYSTEM_BLOCKS
    return talks


def _memory(talks: Sequence[_Conversation]) -> dict[str, float]:
    """Bytes for each held block, the keys' own 49 included: they come fresh from the wire in a gateway."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        index = FleetIndex()
        for talk in talks:
            copies = tuple(BlockHash(bytes(bytearray(block))) for block in talk.hashes)
            index.apply(
                talk.instance,
                BlockStored(block_hashes=copies, parent=None, token_ids=(), block_size_tokens=_BLOCK_TOKENS),
            )
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    held = sum(sum(index.blocks_held(name).values()) for name in {talk.instance for talk in talks})
    return {"held_blocks": held, "bytes_per_held_block": (after - before) / held}


def _fill(index: ResidencyIndex, talks: Sequence[_Conversation]) -> float:
    """Apply one event a block, as an engine that stores block by block does; return blocks per second."""
    events = []
    for talk in talks:
        parent: BlockHash | None = None
        for block in talk.hashes:
            event = BlockStored(block_hashes=(block,), parent=parent, token_ids=(), block_size_tokens=_BLOCK_TOKENS)
            events.append((talk.instance, event))
            parent = block
    with no_collection():
        started = time.perf_counter()
        for instance, event in events:
            index.apply(instance, event)
        return len(events) / (time.perf_counter() - started)


def _empty(index: ResidencyIndex, talks: Sequence[_Conversation]) -> float:
    events = [
        (talk.instance, BlockRemoved(block_hashes=(block,)))
        for talk in talks
        for block in reversed(talk.hashes[_SYSTEM_BLOCKS:])
    ]
    with no_collection():
        started = time.perf_counter()
        for instance, event in events:
            index.apply(instance, event)
        return len(events) / (time.perf_counter() - started)


def _lookups(name: str, index: ResidencyIndex, prompts: Sequence[Sequence[BlockHash]]) -> dict[str, float]:
    took_s = each_s(prompts, index.match)
    return {f"{name}_p50_us": quantile(took_s, 0.5) * 1e6, f"{name}_p99_us": quantile(took_s, 0.99) * 1e6}


def _continued(prompt: Sequence[BlockHash], rng: random.Random) -> list[BlockHash]:
    half = len(prompt) // 2
    return [*prompt[:half], *_unknown(len(prompt) - half, rng)]


def _unknown(length: int, rng: random.Random) -> list[BlockHash]:
    return [_block(rng) for _ in range(length)]


def _block(rng: random.Random) -> BlockHash:
    return BlockHash(rng.randbytes(16))


__all__ = ["FleetPlan", "run"]
