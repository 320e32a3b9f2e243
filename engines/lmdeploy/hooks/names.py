"""Modules and classes of LMDeploy that more than one table names."""

ENGINE = "lmdeploy.pytorch.engine.engine:Engine"
TRIE = "lmdeploy.pytorch.paging.block_trie"
MESSAGES = "lmdeploy.messages"
SEQUENCES = "lmdeploy.pytorch.messages:SequenceManager"
STATUS = "lmdeploy.pytorch.messages.MessageStatus"
