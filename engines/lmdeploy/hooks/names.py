"""Modules and classes of LMDeploy that more than one table names."""

ENGINE = "lmdeploy.pytorch.engine.engine:Engine"
TRIE = "lmdeploy.pytorch.paging.block_trie"
MESSAGES = "lmdeploy.messages"

__all__ = ["ENGINE", "MESSAGES", "TRIE"]
