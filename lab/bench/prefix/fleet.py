"""Look-ups in a fleet's residency index: who holds the longest beginning of a prompt?

The index is filled with ``blocks`` held blocks over ``instances`` instances: conversations of 188 or 2,048 blocks, each
on one instance, all behind a system prompt of 16 blocks that every instance holds. Looked up are whole conversations
(hits), conversations with a new second half (partial hits) and unknown prompts (misses), with their hashes given. The
naive index answers the same questions beside it. A look-up is the match alone, whose answers are worked out for the
instances that are asked for; "every answer" asks for all of them, as the naive index always does.
"""

import random
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvcontrol.core import BlockHash, BlockRemoved, BlockStored, InstanceId
from kvcontrol.prefix_reuse.fleet import FleetIndex
from kvcontrol.prefix_reuse.match import PrefixMatch, ResidencyIndex
from lab.bench.prefix.lookup_times import (
    BLOCK_TOKENS,
    LENGTHS,
    SYSTEM_BLOCKS,
    LookupTimes,
    Measured,
    Quantiles,
    continued,
    random_keys,
)
from lab.bench.timing import no_collection
from lab.research.prefix_index.naive_fleet import NaiveFleetIndex

_CHECKED = 20

Match = Callable[[Sequence[BlockHash]], Mapping[InstanceId, PrefixMatch]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """How much is held, by how many, and how many look-ups of each kind are timed.

    More than ``blocks`` are held where that is too few for one conversation of each length on each instance.
    """

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
        return BlockStored(block_hashes=tuple(self.hashes), parent=None, token_ids=(), block_size_tokens=BLOCK_TOKENS)


def run(plan: FleetPlan) -> Measured:
    """Measure look-ups, events and memory; the hits' times are metrics too (``lookup_188_p50_us`` and so on)."""
    rng = random.Random(plan.seed)  # noqa: S311 - reproducible, not secret
    talks = _conversations(plan, rng)
    metrics = _memory(talks)
    index, naive = FleetIndex(), NaiveFleetIndex()
    metrics["events_per_s"] = _fill(index, talks)
    _fill(naive, talks)
    lookups = _lookups("FleetIndex", index.match, talks, plan, plan.lookups)
    every = _lookups("FleetIndex, every answer", lambda keys: dict(index.match(keys)), talks, plan, plan.lookups)
    beside = _lookups("NaiveFleetIndex, every answer", naive.match, talks, plan, plan.naive_lookups)
    for times in lookups:
        name = f"lookup_{times.prompt_blocks}"
        metrics |= {f"{name}_p50_us": times.hit.p50_us, f"{name}_p99_us": times.hit.p99_us}
    for ours, theirs in zip(every, beside, strict=True):
        ratio = theirs.hit.p50_us / ours.hit.p50_us
        metrics[f"naive_over_every_answer_{ours.prompt_blocks}_ratio"] = ratio
    metrics["removals_per_s"] = _empty(index, talks)
    return Measured(metrics=metrics, lookups=(*lookups, *every, *beside))


def lookups(plan: FleetPlan) -> tuple[LookupTimes, ...]:
    """Measure the fleet index's look-ups alone."""
    rng = random.Random(plan.seed)  # noqa: S311 - reproducible, not secret
    index = FleetIndex()
    talks = _conversations(plan, rng)
    for talk in talks:
        index.apply(talk.instance, talk.stored())
    return _lookups("FleetIndex", index.match, talks, plan, plan.lookups)


def _conversations(plan: FleetPlan, rng: random.Random) -> list[_Conversation]:
    system = random_keys(SYSTEM_BLOCKS, rng)
    talks: list[_Conversation] = []
    held = 0
    while held < plan.blocks or len(talks) < len(LENGTHS) * plan.instances:
        length = LENGTHS[len(talks) // plan.instances % len(LENGTHS)]
        own = random_keys(length - SYSTEM_BLOCKS, rng)
        instance = InstanceId(f"engine-{len(talks) % plan.instances}")
        talks.append(_Conversation(instance=instance, hashes=[*system, *own]))
        held += length - SYSTEM_BLOCKS
    return talks


def _lookups(
    structure: str, match: Match, talks: Sequence[_Conversation], plan: FleetPlan, count: int
) -> tuple[LookupTimes, ...]:
    rng = random.Random(plan.seed + 1)  # noqa: S311 - the held keys came from ``seed``: misses must be others
    held = sum(len(talk.hashes) - SYSTEM_BLOCKS for talk in talks) + SYSTEM_BLOCKS * plan.instances
    found: list[LookupTimes] = []
    for length in (1, *LENGTHS):
        whole = [talk for talk in talks if len(talk.hashes) == max(length, min(LENGTHS))]
        chosen = rng.choices(whole, k=count)
        hits = [talk.hashes[:length] for talk in chosen]
        partial = [continued(prompt, rng) for prompt in hits] if length > 1 else []
        misses = [random_keys(length, rng) for _ in range(count)]
        for place, talk in enumerate(chosen[:_CHECKED]):
            _expect(match(hits[place])[talk.instance].blocks, length)
            if partial:
                _expect(match(partial[place])[talk.instance].blocks, length // 2)
            _expect(len(match(misses[place])), 0)
        times = LookupTimes(
            structure=structure,
            given="keys",
            held_blocks=held,
            instances=plan.instances,
            prompt_blocks=length,
            hit=Quantiles.timed(hits, match),
            partial=Quantiles.timed(partial, match) if partial else None,
            miss=Quantiles.timed(misses, match),
        )
        found.append(times)
    return tuple(found)


def _expect(found: int, wanted: int) -> None:
    if found != wanted:
        raise AssertionError(f"found {found} of {wanted}")


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
                BlockStored(block_hashes=copies, parent=None, token_ids=(), block_size_tokens=BLOCK_TOKENS),
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
            event = BlockStored(block_hashes=(block,), parent=parent, token_ids=(), block_size_tokens=BLOCK_TOKENS)
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
        for block in reversed(talk.hashes[SYSTEM_BLOCKS:])
    ]
    with no_collection():
        started = time.perf_counter()
        for instance, event in events:
            index.apply(instance, event)
        return len(events) / (time.perf_counter() - started)
