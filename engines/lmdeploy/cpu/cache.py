"""Where LMDeploy's KV pool and state pool live: in plain memory instead of on the device named ``cuda``."""

from functools import wraps
from typing import Any


def allocate_gpu_cache(original: Any) -> Any:
    """Replace ``CacheEngine.allocate_gpu_cache``: the same pool and views, on the CPU."""

    @wraps(original)
    def allocate(self: Any) -> Any:
        self.gpu_allocation = self.block_cache_plan.allocate(
            num_logical_blocks=self.cache_config.num_gpu_blocks, device="cpu"
        )
        caches = self.gpu_allocation.tensor_views
        self._block_caches = self._build_block_cache_view(caches)
        return self._build_model_layer_cache(caches)

    return allocate


def allocate_state_caches(original: Any) -> Any:
    """Wrap ``_allocate_state_caches``; ``meta`` (which only measures) stays ``meta``."""

    @wraps(original)
    def allocate(tensor_specs: Any, num_caches: int, device: Any) -> Any:
        return original(tensor_specs, num_caches, "cpu" if str(device).startswith("cuda") else device)

    return allocate
