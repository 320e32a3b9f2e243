"""Both searches find the whole of what was inserted, and both are timed."""

from engines.lmdeploy.benchmarks.trie import run


def test_both_searches_find_all_and_are_timed() -> None:
    metrics = run(lookups=6, prompts=2)
    assert {"lmdeploy_trie_188_p50_us", "tokens_to_verified_188_p50_us"} <= metrics.keys()
    assert all(value > 0 for value in metrics.values())
