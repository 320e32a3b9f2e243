"""Keys are private to a tenant, but for the blocks that were shared by name."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcontrol.core import CacheIdentity, IdentityError, chain_hashes, root_hash, token_bytes
from lab.research.prefix_index.keys import BlockKeys
from tests.support.examples import examples
from tests.support.prefixes import IDENTITY, prompt, salts


def test_the_longest_shared_prefix_counts() -> None:
    keys = BlockKeys(IDENTITY)
    keys.share("short", prompt(1))
    keys.share("long", prompt(1, 2))
    assert keys.of(prompt(1, 2, 3), salt="a")[:2] == keys.of(prompt(1, 2), salt="b")
    assert keys.of(prompt(1, 5), salt="a")[0] == keys.of(prompt(1), salt="b")[0]
    assert keys.of(prompt(1, 5), salt="a")[1] != keys.of(prompt(1, 5), salt="b")[1]


@pytest.mark.parametrize(
    ("name", "tokens", "message"),
    [("", prompt(1), "empty"), ("x", prompt(1), "taken"), ("y", prompt(tail=3), "at least one block of 4")],
)
def test_a_shared_prefix_needs_a_free_name_and_a_full_block(name: str, tokens: bytes, message: str) -> None:
    keys = BlockKeys(IDENTITY)
    keys.share("x", prompt(5))
    with pytest.raises(IdentityError, match=message):
        keys.share(name, tokens)


def test_unsharing_an_unknown_name_lists_the_known_ones() -> None:
    keys = BlockKeys(IDENTITY)
    keys.share("x", prompt(5))
    with pytest.raises(IdentityError, match="no shared prefix is named 'z'; shared are: x"):
        keys.unshare("z")


def sized(block_size_tokens: int) -> CacheIdentity:
    return replace(IDENTITY, block_size_tokens=block_size_tokens)


@pytest.mark.parametrize("block_size_tokens", [1, 2, 3, 4, 5, 8, 16])
def test_no_prompt_can_imitate_the_private_root_behind_a_shared_prefix(block_size_tokens: int) -> None:
    """The last shared hash as tokens: at 4 tokens a block it fills a block exactly."""
    keys = BlockKeys(sized(block_size_tokens))
    shared = token_bytes(range(block_size_tokens))
    keys.share("x", shared)
    behind = token_bytes(range(100, 100 + block_size_tokens))
    honest = keys.of(shared + behind, salt="a")
    last_shared = honest[0]
    for imitation in (last_shared, last_shared * block_size_tokens, last_shared[: block_size_tokens * 4]):
        prompt_tokens = imitation + behind
        assert not set(honest) & set(keys.of(prompt_tokens, salt="a"))


def test_a_shared_prefix_that_ends_within_a_block_shares_its_full_blocks_only() -> None:
    keys = BlockKeys(IDENTITY)
    assert keys.share("x", prompt(1, 2, tail=3)) == 2
    whole, other = prompt(1, 2) + token_bytes([9, 9, 9, 5]), prompt(1, 2) + token_bytes([8, 8, 8, 5])
    for tokens in (whole, other):
        mine, yours = keys.of(tokens, salt="a"), keys.of(tokens, salt="b")
        assert mine[:2] == yours[:2] == keys.of(prompt(1, 2), salt="")
        assert mine[2] != yours[2]


def test_a_prompt_shorter_than_the_shared_prefix_is_private() -> None:
    keys = BlockKeys(IDENTITY)
    keys.share("x", prompt(1, 2))
    assert keys.of(prompt(1), salt="a") != keys.of(prompt(1), salt="b")
    assert keys.of(prompt(1) + prompt(2)[:-4], salt="a") != keys.of(prompt(1) + prompt(2)[:-4], salt="b")


def test_one_prefix_under_two_names_has_the_first_ones_keys_until_that_is_taken_back() -> None:
    keys = BlockKeys(IDENTITY)
    keys.share("first", prompt(1))
    before = keys.of(prompt(1), salt="a")
    keys.share("second", prompt(1))
    assert keys.of(prompt(1), salt="b") == before
    keys.unshare("first")
    after = keys.of(prompt(1), salt="b")
    assert after != before
    assert after == keys.of(prompt(1), salt="a")


def test_what_is_shared_again_has_its_keys_again() -> None:
    keys = BlockKeys(IDENTITY)
    keys.share("x", prompt(1))
    before = keys.of(prompt(1, 2), salt="a")
    keys.unshare("x")
    assert keys.of(prompt(1, 2), salt="a") == chain_hashes(root_hash(IDENTITY, salt="a"), prompt(1, 2), 4)
    keys.share("x", prompt(1))
    assert keys.of(prompt(1, 2), salt="a") == before


@settings(max_examples=examples(200), deadline=None)
@given(
    block_size_tokens=st.integers(1, 6),
    shared=st.lists(st.lists(st.integers(1, 2), min_size=6, max_size=16), max_size=3),
    tokens=st.lists(st.integers(1, 2), max_size=24),
    mine=salts,
    yours=salts,
)
def test_two_tenants_share_exactly_the_blocks_of_the_longest_shared_prefix(
    block_size_tokens: int, shared: list[list[int]], tokens: list[int], mine: str, yours: str
) -> None:
    keys = BlockKeys(sized(block_size_tokens))
    for place, each in enumerate(shared):
        keys.share(str(place), token_bytes(each))
    full = [each[: len(each) // block_size_tokens * block_size_tokens] for each in shared]
    public = max((len(each) for each in full if tokens[: len(each)] == each), default=0) // block_size_tokens
    ours, theirs = keys.of(token_bytes(tokens), salt=mine), keys.of(token_bytes(tokens), salt=yours)
    assert len(ours) == len(tokens) // block_size_tokens
    assert len(set(ours)) == len(ours)
    assert ours[:public] == theirs[:public]
    assert (ours == theirs) if mine == yours else not set(ours[public:]) & set(theirs)


def test_names_and_salts_that_are_no_text_are_refused() -> None:
    keys = BlockKeys(IDENTITY)
    with pytest.raises(IdentityError, match="no Unicode text"):
        keys.share("\ud800", prompt(1))
    with pytest.raises(IdentityError, match="the salt is no Unicode text"):
        keys.of(prompt(1), salt="\ud800")
    with pytest.raises(IdentityError, match="salt is 65 bytes long"):
        keys.of(prompt(1), salt="x" * 65)


def test_a_shared_prefix_of_unpacked_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="17 bytes are no packed tokens"):
        BlockKeys(IDENTITY).share("x", b"x" * 17)
