"""Hooks that publish KV events."""

from engines.lmdeploy.hooks.names import ENGINE, MESSAGES, TRIE
from engines.lmdeploy.patching import Hook


def event_hooks() -> list[Hook]:
    """In the engine process: KV events from the block trie, and the agent that publishes them."""
    from engines.lmdeploy import agent
    from engines.lmdeploy.trie import events

    return [
        Hook(
            target=f"{TRIE}.trie:BlockTrie._get_or_create_root",
            signature="(self, adapter_name: str)",
            replace=events.trie_root,
            why="a node finds its tracker through its trie's root",
        ),
        Hook(
            target=f"{TRIE}.node:Node.attach_to",
            signature="(self, parent: 'Node')",
            replace=events.node_attach_to,
            why="a block became reusable",
        ),
        Hook(
            target=f"{TRIE}.node:Node.detach_leaf",
            signature="(self)",
            replace=events.node_detach_leaf,
            why="a block was evicted",
        ),
        Hook(
            target=f"{TRIE}.trie:BlockTrie._extend_trie_path",
            signature=(
                "(self, seq: lmdeploy.pytorch.messages.SchedulerSequence, "
                f"node: {TRIE}.node.Node, num_complete_blocks: int)"
            ),
            replace=events.trie_change,
            why="a path is complete: its blocks are published together",
        ),
        Hook(
            target=f"{TRIE}.trie:BlockTrie.evict",
            signature="(self, max_num_blocks: int)",
            replace=events.trie_evict,
            why="all blocks evicted in one step are published together",
        ),
        Hook(
            target=f"{ENGINE}.__init__",
            signature=(
                f"(self, model_path: str, engine_config: {MESSAGES}.PytorchEngineConfig = None, "
                f"trust_remote_code: bool = False, speculative_config: {MESSAGES}.SpeculativeConfig = None) -> None"
            ),
            replace=agent.engine_init,
            why="an engine gets its agent",
        ),
        Hook(
            target=f"{ENGINE}._loop_finally",
            signature="(self)",
            replace=agent.engine_loop_finally,
            why="the agent closes with its engine",
        ),
    ]
