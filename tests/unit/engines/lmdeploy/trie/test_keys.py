"""The block trie's quicker keys against LMDeploy's own: what is found must be the same."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("lmdeploy")

from engines.lmdeploy.hooks import key_hooks
from engines.lmdeploy.patching import install

_TOKENS = st.lists(st.integers(0, 3), min_size=2, max_size=3)
_IDENTITY = st.sampled_from([(), ("a",), ("a", "b")])


@pytest.fixture
def tries() -> Iterator[tuple[Any, Any]]:
    """LMDeploy's two methods as they are and as they are replaced."""
    from lmdeploy.pytorch.paging.block_trie.trie import BlockTrie

    names = ("_hash_block", "_node_matches_block")
    own = SimpleNamespace(**{name: getattr(BlockTrie, name) for name in names})
    undo = install(key_hooks())
    yield own, SimpleNamespace(**{name: getattr(BlockTrie, name) for name in names})
    undo()


def test_blocks_match_as_they_did(tries: tuple[Any, Any]) -> None:
    own, quick = tries

    @given(first=_TOKENS, second=_TOKENS, identity=_IDENTITY, other=_IDENTITY)
    def check(first: list[int], second: list[int], identity: tuple[str, ...], other: tuple[str, ...]) -> None:
        left, right = np.array(first), np.array(second)
        node = SimpleNamespace(token_ids=left, extra_identity=identity)
        same = own._node_matches_block(node, right, other)
        assert quick._node_matches_block(node, right, other) is bool(same)
        if same:
            assert quick._hash_block(left, identity) == quick._hash_block(right, other)

    check()


def test_a_part_of_an_array_is_taken_for_what_it_holds(tries: tuple[Any, Any]) -> None:
    _, quick = tries
    whole = np.arange(64)
    node = SimpleNamespace(token_ids=whole[::2][3:9], extra_identity=())
    assert quick._node_matches_block(node, np.array([6, 8, 10, 12, 14, 16]), ())
    assert quick._hash_block(whole[::2][3:9], ()) == quick._hash_block(np.array([6, 8, 10, 12, 14, 16]), ())


def test_tokens_of_another_type_are_no_match(tries: tuple[Any, Any]) -> None:
    _, quick = tries
    node = SimpleNamespace(token_ids=np.array([1, 0], dtype=np.int32), extra_identity=())
    assert not quick._node_matches_block(node, np.array([1], dtype=np.int64), ())
