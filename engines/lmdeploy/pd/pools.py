"""The engine's KV pools and its configuration, as LMDeploy describes them to a peer."""

from collections.abc import Sequence
from typing import Any


def pools_of(engine: Any) -> Sequence[Any]:
    """Return the ``CachePool``s of an LMDeploy engine whose model runs in this process."""
    pools: Sequence[Any] = engine.executor.model_agent.cache_engine.gpu_allocation.pools
    return pools


def pool_descriptions(engine: Any) -> list[dict[str, Any]]:
    """Return the layout of each pool; raises ``RuntimeError`` for one that can't be sent."""
    from lmdeploy.pytorch.engine.cache_engine.migration import describe_cache_pools

    described = describe_cache_pools(pools_of(engine), engine.cache_config.num_gpu_blocks)
    return [each.model_dump(mode="json") for each in described]


def engine_description(engine: Any) -> dict[str, Any]:
    """Return the answer of ``GET /distserve/engine_info``."""
    config = engine.engine_config
    return {
        "tp_size": int(config.tp),
        "dp_size": int(config.dp),
        "pp_size": None,
        "ep_size": int(config.ep),
        "dp_rank": int(config.dp_rank),
        "block_size": int(engine.cache_config.block_size),
        "num_cpu_blocks": int(engine.cache_config.num_cpu_blocks),
        "num_gpu_blocks": int(engine.cache_config.num_gpu_blocks),
    }
