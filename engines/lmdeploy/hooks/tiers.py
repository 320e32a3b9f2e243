"""What is replaced so that an engine's KV blocks find their way below HBM and back."""

from engines.lmdeploy.hooks.names import TRIE
from engines.lmdeploy.patching import Hook

_FACTORY = "lmdeploy.pytorch.kv_connector.factory"


def tier_hooks() -> list[Hook]:
    """In the engine process: kvgate's connector, where tiers are configured."""
    from engines.lmdeploy.offload import setup
    from engines.lmdeploy.trie import path

    return [
        Hook(
            target=f"{_FACTORY}:prepare_kv_connector_config",
            signature=(
                "(cache_config: 'CacheConfig', *, model_path: 'str | None' = None, "
                "dist_config: 'DistConfig | None' = None, distributed_executor_backend: 'str | None' = None) -> 'None'"
            ),
            replace=setup.prepare_config,
            why="the settings turn the connector on before LMDeploy looks at it",
        ),
        Hook(
            target=f"{_FACTORY}:build_kv_connector",
            signature=(
                "(role: 'KVConnectorRole', cache_config: 'CacheConfig', *, global_rank: 'int' = 0, tp_rank: 'int' = 0, "
                "tp_size: 'int' = 1, kv_head_replica_num: 'int' = 1) -> 'KVConnectorBase | None'"
            ),
            replace=setup.build_connector,
            why="LMDeploy's factory knows one connector by name",
        ),
        Hook(
            target=f"{TRIE}.trie:BlockTrie._extend_trie_path",
            signature=(
                "(self, seq: lmdeploy.pytorch.messages.SchedulerSequence, "
                f"node: {TRIE}.node.Node, num_complete_blocks: int)"
            ),
            replace=path.trie_extend_path,
            why="loaded blocks are inserted at once, prepared during the load",
        ),
    ]
