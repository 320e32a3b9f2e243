"""A block's hash depends on everything that its KV depends on, and on nothing else."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcontrol.core import CacheIdentity, IdentityError, chain_hashes, child_hash, root_hash, token_bytes

BASE = {"model": "m", "revision": "r1", "kv_dtype": "float32", "block_size_tokens": 16}
IDENTITY = CacheIdentity(**BASE)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=200)


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "n"},
        {"revision": "r2"},
        {"kv_dtype": "int8"},
        {"block_size_tokens": 32},
        {"tp_size": 2},
        {"tp_size": 2, "tp_rank": 1},
    ],
)
def test_every_field_of_the_identity_changes_the_root(changed: dict[str, object]) -> None:
    assert root_hash(CacheIdentity(**(BASE | changed))) != root_hash(IDENTITY)


def test_the_salt_and_the_adapter_change_the_root_and_cannot_imitate_each_other() -> None:
    roots = {root_hash(IDENTITY), root_hash(IDENTITY, salt="x"), root_hash(IDENTITY, adapter="x")}
    assert len(roots) == 3


def test_other_contents_of_an_adapter_change_its_own_root_and_no_other() -> None:
    before = CacheIdentity(**BASE, adapters=(("sql", "r1"), ("tools", "r1")))
    after = CacheIdentity(**BASE, adapters=(("sql", "r2"), ("tools", "r1")))
    assert root_hash(before, adapter="sql") != root_hash(after, adapter="sql")
    for adapter in ("", "tools", "unknown"):
        assert root_hash(before, adapter=adapter) == root_hash(after, adapter=adapter)
    assert root_hash(before) == root_hash(IDENTITY)


def test_a_field_cannot_imitate_its_neighbour() -> None:
    one = CacheIdentity(**(BASE | {"model": "m", "revision": "8:revision"}))
    two = CacheIdentity(**(BASE | {"model": "m8:", "revision": "revision"}))
    assert root_hash(one) != root_hash(two)


def test_the_hash_is_stable_over_processes_and_releases() -> None:
    root = root_hash(IDENTITY, salt="tenant")
    (block,) = chain_hashes(root, token_bytes(range(16)), 16)
    assert (root.hex(), block.hex()) == ("1974f6ae7f9f66dc5a7659aa88e4e338", "2f361901ba2f776d64d79f29598edcb6")


def test_a_salt_that_is_too_long_is_refused_by_name_and_limit() -> None:
    with pytest.raises(IdentityError, match="65 bytes long; at most 64"):
        root_hash(IDENTITY, salt="s" * 65)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": ""}, "model is empty"),
        ({"block_size_tokens": 0}, "block_size_tokens is 0"),
        ({"tp_size": 2, "tp_rank": 2}, "tp_rank is 2"),
        ({"adapters": (("b", "r"), ("a", "r"))}, "adapters are .'b', 'a'.; they must be in order"),
        ({"adapters": (("a", "r"), ("a", "s"))}, "each named once"),
    ],
)
def test_an_impossible_identity_is_refused_with_the_fields_name(changed: dict[str, object], message: str) -> None:
    with pytest.raises(IdentityError, match=message):
        CacheIdentity(**(BASE | changed))


@given(tokens, st.integers(1, 20))
def test_only_full_blocks_have_a_hash(ids: list[int], size: int) -> None:
    assert len(chain_hashes(root_hash(IDENTITY), token_bytes(ids), size)) == len(ids) // size


@given(tokens, st.integers(0, 12))
def test_going_on_from_a_known_hash_equals_hashing_the_whole(ids: list[int], known: int) -> None:
    root = root_hash(IDENTITY)
    whole = chain_hashes(root, token_bytes(ids), 16)
    known = min(known, len(whole))
    parent = whole[known - 1] if known else root
    assert whole[:known] + chain_hashes(parent, token_bytes(ids[known * 16 :]), 16) == whole


@given(st.lists(st.integers(0, 2**32 - 1), min_size=16, max_size=16), st.integers(0, 15))
def test_one_changed_token_changes_the_block_and_all_after_it(ids: list[int], where: int) -> None:
    other = list(ids)
    other[where] ^= 1
    root = root_hash(IDENTITY)
    assert all(
        a != b
        for a, b in zip(
            chain_hashes(root, token_bytes(ids * 3), 16),
            chain_hashes(root, token_bytes(other + ids * 2), 16),
            strict=True,
        )
    )


def test_a_chain_is_made_of_child_hashes() -> None:
    root = root_hash(IDENTITY)
    buffer = token_bytes(range(32))
    first = child_hash(root, buffer[:64])
    assert chain_hashes(root, buffer, 16) == [first, child_hash(first, buffer[64:])]


def test_extra_content_changes_a_block() -> None:
    root = root_hash(IDENTITY)
    assert child_hash(root, b"\0" * 64, extra=b"image") != child_hash(root, b"\0" * 64)


def test_token_ids_are_packed_little_endian_whatever_holds_them() -> None:
    assert token_bytes([1, 256]) == token_bytes(array("I", [1, 256])) == b"\x01\0\0\0\0\x01\0\0"


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_an_id_that_is_no_token_is_refused(bad: int) -> None:
    with pytest.raises(OverflowError):
        token_bytes([bad])
