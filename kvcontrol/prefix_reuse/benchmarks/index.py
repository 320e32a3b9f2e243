"""Look-ups in one engine's prefix index, and what verifying their tokens adds; a walk over a plain dict beside it.

The index holds ``blocks`` blocks of 64 random tokens in prompts of 188 or 2,048 blocks. Looked up are whole prompts,
with their keys given; ``verify`` is timed on the hits.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvcontrol.core import BlockHash, CacheIdentity
from kvcontrol.core.hashing import TOKEN_BYTES
from kvcontrol.prefix_reuse.benchmarks.timing import each_s, quantile
from kvcontrol.prefix_reuse.entry import PrefixHit
from kvcontrol.prefix_reuse.index import PrefixReuseIndex
from kvcontrol.prefix_reuse.keys import BlockKeys

_LENGTHS = (188, 2_048)
_BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexPlan:
    """How much is held, and how many look-ups are timed."""

    blocks: int = 100_000
    lookups: int = 500
    seed: int = 0


def run(plan: IndexPlan) -> dict[str, float]:
    """Return metrics by name, with the number of held blocks and their unit in it."""
    rng = random.Random(plan.seed)  # noqa: S311 - reproducible, not secret
    identity = CacheIdentity(model="m", revision="r", kv_dtype="bfloat16", block_size_tokens=_BLOCK_TOKENS)
    index = PrefixReuseIndex(BlockKeys(identity), capacity_blocks=plan.blocks + max(_LENGTHS))
    flat: dict[BlockHash, int] = {}
    prompts: list[tuple[bytes, list[BlockHash]]] = []
    while len(index) < plan.blocks:
        length = _LENGTHS[len(prompts) % len(_LENGTHS)]
        tokens = rng.randbytes(length * _BLOCK_TOKENS * TOKEN_BYTES)
        keys = index.keys.of(tokens)
        index.insert(tokens, range(len(index), len(index) + length))
        flat |= dict.fromkeys(keys, 0)
        prompts.append((tokens, keys))
    size = f"{plan.blocks:.0e}".replace("e+0", "e")
    metrics: dict[str, float] = {}
    for length in (1, *_LENGTHS):
        chosen = [
            _cut(prompt, length) for prompt in rng.choices([p for p in prompts if len(p[1]) >= length], k=plan.lookups)
        ]
        looked_up_s = each_s(
            [keys for _, keys in chosen], lambda keys: index.lookup_keys(keys, len(keys) * _BLOCK_TOKENS)
        )
        hits = [(index.lookup_keys(keys, len(keys) * _BLOCK_TOKENS), tokens) for tokens, keys in chosen]
        verified_s = each_s(hits, lambda hit: _verified(index, hit))
        walked_s = each_s([keys for _, keys in chosen], lambda keys: _walk(flat, keys))
        name = f"{size}_{length}"
        metrics |= {
            f"index_lookup_{name}_p50_us": quantile(looked_up_s, 0.5) * 1e6,
            f"index_lookup_{name}_p99_us": quantile(looked_up_s, 0.99) * 1e6,
            f"index_verify_{name}_p50_us": quantile(verified_s, 0.5) * 1e6,
            f"index_verify_{name}_p99_us": quantile(verified_s, 0.99) * 1e6,
            f"dict_walk_{name}_p50_us": quantile(walked_s, 0.5) * 1e6,
        }
    return metrics


def _cut(prompt: tuple[bytes, list[BlockHash]], blocks: int) -> tuple[bytes, list[BlockHash]]:
    tokens, keys = prompt
    return tokens[: blocks * _BLOCK_TOKENS * TOKEN_BYTES], keys[:blocks]


def _verified(index: PrefixReuseIndex, found: tuple[PrefixHit, bytes]) -> PrefixHit:
    hit, tokens = found
    verified = index.matcher.verify(hit, tokens)
    if verified.matched_length != hit.matched_length:
        raise AssertionError("a hit on its own tokens was cut off")
    return verified


def _walk(flat: dict[BlockHash, int], keys: Sequence[BlockHash]) -> int:
    found = 0
    for key in keys:
        if key not in flat:
            break
        found += 1
    return found


__all__ = ["IndexPlan", "run"]
