"""Look-ups in one engine's prefix index, and what verifying their tokens adds; a walk over a plain dict beside it.

The index holds ``blocks`` blocks of 64 random tokens in prompts of 188 or 2,048 blocks. Looked up are prompts that are
held whole, in half and not at all, with their keys given; ``verify`` is given the look-up's answer and the tokens.
"""

import random
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcontrol.core import BlockHash, CacheIdentity
from kvcontrol.core.hashing import TOKEN_BYTES
from lab.bench.prefix.lookup_times import (
    BLOCK_TOKENS,
    LENGTHS,
    LookupTimes,
    Measured,
    Quantiles,
    continued,
    random_keys,
)
from lab.research.prefix_index.entry import PrefixHit
from lab.research.prefix_index.index import PrefixReuseIndex
from lab.research.prefix_index.keys import BlockKeys

_BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexPlan:
    """How much is held, and how many look-ups are timed."""

    blocks: int = 100_000
    lookups: int = 500
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompt:
    tokens: bytes
    keys: Sequence[BlockHash]


def run(plan: IndexPlan) -> Measured:
    """Measure look-ups and ``verify``."""
    rng = random.Random(plan.seed)  # noqa: S311 - reproducible, not secret
    index = _index(plan)
    flat: dict[BlockHash, int] = {}
    prompts: list[_Prompt] = []
    while len(index) < plan.blocks or len(prompts) < len(LENGTHS):
        tokens = rng.randbytes(LENGTHS[len(prompts) % len(LENGTHS)] * _BLOCK_BYTES)
        prompts.append(_Prompt(tokens=tokens, keys=index.keys.of(tokens)))
        _insert(index, tokens)
        flat |= dict.fromkeys(prompts[-1].keys, 0)
    lookups = [
        times for length in (1, *LENGTHS) for times in _lookups(index, flat, _cut(prompts, length, rng, plan), plan)
    ]
    return Measured(metrics={}, lookups=tuple(lookups))


def memory(plan: IndexPlan) -> dict[str, float]:
    """Bytes for each block held: in all, and without the block's own tokens, which an engine's index has to keep."""
    rng = random.Random(plan.seed)  # noqa: S311
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        index = _index(plan)
        while len(index) < plan.blocks:
            _insert(index, rng.randbytes(LENGTHS[0] * _BLOCK_BYTES))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    each = (after - before) / len(index)
    return {"index_bytes_per_block": each, "index_bytes_per_block_without_tokens": each - _BLOCK_BYTES}


def _index(plan: IndexPlan) -> PrefixReuseIndex:
    identity = CacheIdentity(model="m", revision="r", kv_dtype="bfloat16", block_size_tokens=BLOCK_TOKENS)
    return PrefixReuseIndex(BlockKeys(identity), capacity_blocks=plan.blocks + sum(LENGTHS))


def _insert(index: PrefixReuseIndex, tokens: bytes) -> None:
    held = len(index)
    index.insert(tokens, range(held, held + len(tokens) // _BLOCK_BYTES))


def _cut(prompts: Sequence[_Prompt], blocks: int, rng: random.Random, plan: IndexPlan) -> list[_Prompt]:
    """Choose prompts of so many blocks, cut to it where that is one."""
    long_enough = [prompt for prompt in prompts if len(prompt.keys) == max(blocks, min(LENGTHS))]
    return [
        _Prompt(tokens=prompt.tokens[: blocks * _BLOCK_BYTES], keys=prompt.keys[:blocks])
        for prompt in rng.choices(long_enough, k=plan.lookups)
    ]


def _lookups(
    index: PrefixReuseIndex, flat: dict[BlockHash, int], hits: Sequence[_Prompt], plan: IndexPlan
) -> list[LookupTimes]:
    rng = random.Random(plan.seed + 1)  # noqa: S311
    length = len(hits[0].keys)
    partial = [_Prompt(tokens=each.tokens, keys=continued(each.keys, rng)) for each in hits] if length > 1 else []
    misses = [_Prompt(tokens=each.tokens, keys=random_keys(length, rng)) for each in hits]
    works: tuple[tuple[str, str, Callable[[_Prompt], object]], ...] = (
        ("PrefixReuseIndex.lookup", "keys", lambda prompt: _found(index, prompt)),
        ("dict walk", "keys", lambda prompt: _walk(flat, prompt.keys)),
    )
    found = [
        LookupTimes(
            structure=structure,
            given=given,
            held_blocks=len(index),
            instances=1,
            prompt_blocks=length,
            hit=Quantiles.timed(hits, work),
            partial=Quantiles.timed(partial, work) if partial else None,
            miss=Quantiles.timed(misses, work),
        )
        for structure, given, work in works
    ]
    verify = LookupTimes(
        structure="PrefixMatcher.verify",
        given="hit and tokens",
        held_blocks=len(index),
        instances=1,
        prompt_blocks=length,
        hit=_verified(index, hits, length),
        partial=_verified(index, partial, length // 2) if partial else None,
        miss=_verified(index, misses, 0),
    )
    return [found[0], verify, found[1]]


def _found(index: PrefixReuseIndex, prompt: _Prompt) -> PrefixHit:
    return index.lookup_keys(prompt.keys, len(prompt.keys) * BLOCK_TOKENS)


def _verified(index: PrefixReuseIndex, prompts: Sequence[_Prompt], blocks: int) -> Quantiles:
    """Time ``verify`` on the prompts' hits, which must be of so many blocks and stand."""
    found = [(_found(index, prompt), prompt.tokens) for prompt in prompts]

    def work(call: tuple[PrefixHit, bytes]) -> None:
        if len(index.matcher.verify(*call).kv_block_ids) != blocks:
            raise AssertionError(f"a hit of {len(call[0].kv_block_ids)} blocks did not verify as {blocks}")

    return Quantiles.timed(found, work)


def _walk(flat: dict[BlockHash, int], keys: Sequence[BlockHash]) -> int:
    found = 0
    for key in keys:
        if key not in flat:
            break
        found += 1
    return found
