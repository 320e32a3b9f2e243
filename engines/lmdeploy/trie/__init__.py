"""LMDeploy's block trie: its KV events, its eviction, its pins and its keys."""

__all__: list[str] = []
