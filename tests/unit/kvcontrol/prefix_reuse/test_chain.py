"""A growing prompt's blocks: each hashed once, all or none of them known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcontrol.core import chain_hashes, root_hash
from kvcontrol.prefix_reuse import PromptChain
from tests.support.prefixes import IDENTITY, SIZE, prompt

ROOT = root_hash(IDENTITY)
TOKENS = prompt(*range(10), tail=3)
WIDTH = SIZE * 4


class Source:
    """A sequence that remembers which of its tokens were asked for, and may fail."""

    def __init__(self, tokens: bytes = TOKENS) -> None:
        self.tokens = tokens
        self.asked: list[tuple[int, int]] = []
        self.error: Exception | None = None

    def __call__(self, first: int, last: int) -> bytes:
        self.asked.append((first, last))
        if self.error is not None:
            raise self.error
        return self.tokens[first * 4 : last * 4]


def chain_of(source: Source) -> PromptChain:
    return PromptChain(ROOT, block_size_tokens=SIZE, source=source)


@given(st.lists(st.integers(0, 10), max_size=6))
def test_however_it_grows_its_keys_are_those_of_the_whole(lengths: list[int]) -> None:
    source = Source()
    chain = chain_of(source)
    for length in lengths:
        chain.grow(length)
    known = max(lengths, default=0)
    assert chain.keys == chain_hashes(ROOT, TOKENS, SIZE)[:known]
    assert [chain.tokens(block) for block in range(known)] == [
        TOKENS[block * WIDTH : (block + 1) * WIDTH] for block in range(known)
    ]
    assert [chain.parent(block) for block in range(known)] == [None, *chain.keys[:-1]][:known]
    asked = [position for first, last in source.asked for position in range(first, last)]
    assert asked == [*range(known * SIZE)]


@pytest.mark.parametrize("given_bytes", [TOKENS, TOKENS[: 7 * WIDTH - 1], TOKENS[: 4 * WIDTH], b""])
def test_a_source_that_gives_too_few_tokens_is_named_and_changes_nothing(given_bytes: bytes) -> None:
    source = Source(given_bytes)
    chain = chain_of(source)
    known = min(4, len(given_bytes) // WIDTH)
    chain.grow(known)
    keys = list(chain.keys)
    with pytest.raises(ValueError, match=rf"bytes for tokens {known * SIZE} to 47; they have {(12 - known) * WIDTH}"):
        chain.grow(12)
    assert chain.keys == keys
    source.tokens = prompt(*range(12))
    chain.grow(12)
    assert chain.keys == chain_hashes(ROOT, source.tokens, SIZE)


def test_a_source_that_gives_too_many_tokens_is_refused_too() -> None:
    chain = PromptChain(ROOT, block_size_tokens=SIZE, source=lambda first, last: TOKENS[first * 4 : last * 4 + 4])
    with pytest.raises(ValueError, match="the source gave 36 bytes for tokens 0 to 7; they have 32"):
        chain.grow(2)
    assert chain.keys == []


def test_a_source_that_fails_changes_nothing() -> None:
    source = Source()
    chain = chain_of(source)
    chain.grow(2)
    source.error = OSError("gone")
    with pytest.raises(OSError, match="gone"):
        chain.grow(5)
    source.error = None
    chain.grow(5)
    assert chain.keys == chain_hashes(ROOT, TOKENS, SIZE)[:5]


@pytest.mark.parametrize("size", [0, -4])
def test_a_block_has_tokens(size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size_tokens is {size}; it must be > 0"):
        PromptChain(ROOT, block_size_tokens=size, source=Source())
