"""LMDeploy's search finds what was inserted, no more and no less."""

from array import array

import pytest

from lab.bench.prefix.lmdeploy_trie import LmdeployTrie

HELD = array("I", range(256))


@pytest.fixture
def trie() -> LmdeployTrie:
    trie = LmdeployTrie()
    trie.insert(trie.given(HELD))
    return trie


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [(HELD, 256), (HELD[:192] + array("I", range(64)), 192), (array("I", range(1, 257)), 0)],
)
def test_the_longest_held_prefix_is_found(trie: LmdeployTrie, prompt: "array[int]", tokens: int) -> None:
    assert trie.find(trie.given(prompt)) == tokens


def test_conversations_share_their_beginning(trie: LmdeployTrie) -> None:
    other = HELD[:128] + array("I", range(1_000, 1_128))
    trie.insert(trie.given(other))
    assert trie.find(trie.given(other)) == trie.find(trie.given(HELD)) == 256
