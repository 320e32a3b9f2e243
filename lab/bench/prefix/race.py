"""The same question to several structures: how many of this prompt's tokens are held, each of them compared?

All hold the same conversations and are given the same prompts as plain tokens, each in the form it likes, so hashing is
part of the time for those that hash. They take turns, a tenth of the calls at a time, so that a machine's moods meet
all alike. Every answer is checked.
"""

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from kvcontrol.core import CacheIdentity, chain_hashes, root_hash, token_bytes
from kvcontrol.core.hashing import TOKEN_BYTES
from lab.bench.prefix.lookup_times import (
    BLOCK_TOKENS,
    LENGTHS,
    SYSTEM_BLOCKS,
    LookupTimes,
    Quantiles,
)
from lab.bench.timing import each_s
from lab.research.prefix_index.index import PrefixReuseIndex
from lab.research.prefix_index.keys import BlockKeys

_VOCABULARY = 50_000
_ROUNDS = 10

G = TypeVar("G")


class Contender(Protocol[G]):
    """A structure in the race; ``G`` is the form in which it likes tokens."""

    name: str

    def given(self, tokens: "array[int]") -> G:
        """Return a prompt in its own form; not timed."""

    def insert(self, prompt: G) -> None:
        """Hold a prompt of whole blocks."""

    def find(self, prompt: G) -> int:
        """Return how many of the prompt's first tokens are held; whole blocks, tokens compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RacePlan:
    """How much each holds, and how many look-ups of each kind are timed."""

    blocks: int = 100_000
    lookups: int = 200
    seed: int = 0


class OurIndex:
    """``PrefixReuseIndex``: hash, look up, compare."""

    name = "PrefixReuseIndex, lookup and verify"

    def __init__(self, plan: RacePlan) -> None:
        identity = CacheIdentity(model="m", revision="r", kv_dtype="bfloat16", block_size_tokens=BLOCK_TOKENS)
        self._index = PrefixReuseIndex(BlockKeys(identity), capacity_blocks=plan.blocks + sum(LENGTHS))

    def given(self, tokens: "array[int]") -> bytes:
        return token_bytes(tokens)

    def insert(self, prompt: bytes) -> None:
        self._index.insert(prompt, range(len(prompt) // TOKEN_BYTES // BLOCK_TOKENS))

    def find(self, prompt: bytes) -> int:
        return self._index.matcher.verify(self._index.lookup(prompt), prompt).matched_length


class HashedDict:
    """The least that can be done with chained hashes: one dictionary from hash to tokens, walked."""

    name = "dict of chained hashes, walk and compare"

    def __init__(self) -> None:
        self._root = root_hash(
            CacheIdentity(model="m", revision="r", kv_dtype="bfloat16", block_size_tokens=BLOCK_TOKENS)
        )
        self._tokens: dict[bytes, bytes] = {}

    def given(self, tokens: "array[int]") -> bytes:
        return token_bytes(tokens)

    def insert(self, prompt: bytes) -> None:
        width = BLOCK_TOKENS * TOKEN_BYTES
        for place, key in enumerate(chain_hashes(self._root, prompt, BLOCK_TOKENS)):
            self._tokens[key] = prompt[place * width : (place + 1) * width]

    def find(self, prompt: bytes) -> int:
        width = BLOCK_TOKENS * TOKEN_BYTES
        start = 0
        for key in chain_hashes(self._root, prompt, BLOCK_TOKENS):
            if self._tokens.get(key) != prompt[start : start + width]:
                break
            start += width
        return start // TOKEN_BYTES


def race(contenders: Sequence[Contender[Any]], plan: RacePlan) -> tuple[LookupTimes, ...]:
    """Return each contender's times, in the contenders' order for each length."""
    rng = random.Random(plan.seed)  # noqa: S311 - reproducible, not secret
    talks = _conversations(plan, rng)
    held = sum(len(talk) // BLOCK_TOKENS - SYSTEM_BLOCKS for talk in talks) + SYSTEM_BLOCKS
    for contender in contenders:
        for talk in talks:
            contender.insert(contender.given(talk))
    found: list[LookupTimes] = []
    for length in LENGTHS:
        tokens = length * BLOCK_TOKENS
        whole = [talk for talk in talks if len(talk) == tokens]
        hits = rng.choices(whole, k=plan.lookups)
        half = length // 2 * BLOCK_TOKENS
        outcomes = [
            _in_turns(contenders, hits, tokens),
            _in_turns(contenders, [hit[:half] + _random_tokens(tokens - half, rng) for hit in hits], half),
            _in_turns(contenders, [_random_tokens(tokens, rng) for _ in hits], 0),
        ]
        found += [
            LookupTimes(
                structure=contender.name,
                given="tokens",
                held_blocks=held,
                instances=1,
                prompt_blocks=length,
                hit=hit,
                partial=partial,
                miss=miss,
            )
            for contender, hit, partial, miss in zip(contenders, *outcomes, strict=True)
        ]
    return tuple(found)


def _in_turns(contenders: Sequence[Contender[Any]], prompts: Sequence["array[int]"], wanted: int) -> list[Quantiles]:
    calls = [[contender.given(prompt) for prompt in prompts] for contender in contenders]
    took_s: list[list[float]] = [[] for _ in contenders]
    step = max(1, len(prompts) // _ROUNDS)
    for start in range(0, len(prompts), step):
        for place, contender in enumerate(contenders):
            took_s[place] += each_s(
                calls[place][start : start + step],
                lambda prompt, contender=contender: _expect(contender.find(prompt), wanted),  # type: ignore[misc]
                warm_up=1,
            )
    return [Quantiles.of(sorted(times)) for times in took_s]


def _expect(found: int, wanted: int) -> None:
    if found != wanted:
        raise AssertionError(f"found {found} tokens where {wanted} are held")


def _conversations(plan: RacePlan, rng: random.Random) -> list["array[int]"]:
    """Conversations of both lengths in turns, all with the same beginning, until so many blocks are held."""
    system = _random_tokens(SYSTEM_BLOCKS * BLOCK_TOKENS, rng)
    talks: list[array[int]] = []
    held = 0
    while held < plan.blocks or len(talks) < len(LENGTHS):
        own = LENGTHS[len(talks) % len(LENGTHS)] - SYSTEM_BLOCKS
        talks.append(system + _random_tokens(own * BLOCK_TOKENS, rng))
        held += own
    return talks


def _random_tokens(count: int, rng: random.Random) -> "array[int]":
    return array("I", rng.choices(range(_VOCABULARY), k=count))
