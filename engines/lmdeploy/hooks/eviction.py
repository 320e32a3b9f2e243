"""Hooks that let a policy choose the block trie's eviction victims."""

from engines.lmdeploy.hooks.names import TRIE
from engines.lmdeploy.patching import Hook

_BLOCKS = "lmdeploy.pytorch.paging.block_manager.base_block_manager"


def eviction_hooks() -> list[Hook]:
    """In the engine process: the choice of victims, and the changes that the policy follows."""
    from engines.lmdeploy.trie import replacements

    lifecycle = f"{TRIE}.kv_lifecycle:KVBlockLifecycle"
    return [
        Hook(
            target=f"{_BLOCKS}:LogicalMemory.__init__",
            signature="(self, num_blocks: int) -> None",
            replace=replacements.memory_init,
            why="access times are cut to whole seconds, and whatever compares them sees ties",
        ),
        Hook(
            target=f"{lifecycle}.__init__",
            signature="(self, allocator: 'LogicalAllocator', state_checkpoints: 'StateCheckpointLifecycle')",
            replace=replacements.lifecycle_init,
            why="a trie gets its policy",
        ),
        Hook(
            target=f"{lifecycle}.commit_path_extension",
            signature="(self, node: 'Node', ref_blocks: 'list[int]', free_blocks: 'list[int]')",
            replace=replacements.lifecycle_commit,
            why="the policy follows new blocks, a path at a time and after their references",
        ),
        Hook(
            target=f"{lifecycle}.evict",
            signature="(self, max_num_blocks: 'int')",
            replace=replacements.lifecycle_evict,
            why="it scans all leaves and orders them by whole seconds",
        ),
        Hook(
            target=f"{_BLOCKS}:LogicalAllocator.add_ref_count",
            signature="(self, blocks: numpy.ndarray, value: numpy.ndarray)",
            replace=replacements.allocator_add_ref_count,
            why="the policy follows the blocks in use",
        ),
        Hook(
            target=f"{TRIE}.trie:BlockTrie.allocate",
            signature="(self, seq: lmdeploy.pytorch.messages.SchedulerSequence)",
            replace=replacements.trie_allocate,
            why="the policy receives a whole prompt before its blocks are in the trie",
        ),
        Hook(
            target=f"{TRIE}.trie:BlockTrie.finalize_match",
            signature="(seq: lmdeploy.pytorch.messages.SchedulerSequence) -> None",
            replace=replacements.trie_finalize_match,
            why="the policy follows repeated look-ups of blocks",
        ),
    ]
