"""The KV memory of a vLLM worker, moved as any other torch memory.

vLLM hands a connector one tensor a layer, in one of these shapes, each of which may be a permuted view:

    [num_blocks, 2, ...]   keys and values of a block side by side
    [num_blocks, ...]      latent attention (MLA), one tensor for both
    [2, num_blocks, ...]   all keys before all values: a block is two pieces a layer

``vllm_rows`` sees them as the rows of bytes that ``TorchBackend`` moves.
"""

from collections.abc import Mapping
from importlib.util import find_spec

import torch

from kvcontrol.kv_runtime.backends.torch import TorchBackend
from kvcontrol.kv_runtime.errors import BackendError

_HALVES = ("keys", "values")


def vllm_backend(kv_caches: Mapping[str, torch.Tensor], *, num_blocks: int) -> TorchBackend:
    """Return the backend over what a vLLM connector was given by ``register_kv_caches``.

    Raises ``BackendError`` where vLLM is not installed, and for tensors of another layout.
    """
    if find_spec("vllm") is None:
        raise BackendError("vLLM is not installed; its KV memory can be used in a vLLM worker's process alone")
    return TorchBackend(vllm_rows(kv_caches, num_blocks=num_blocks))


def vllm_rows(kv_caches: Mapping[str, torch.Tensor], *, num_blocks: int) -> dict[str, torch.Tensor]:
    """Return views of the same memory as uint8 ``[num_blocks, bytes]``, keys before values where they lie apart.

    Raises ``BackendError`` for a tensor whose blocks are not whole pieces of memory, one after the other.
    """
    rows: dict[str, torch.Tensor] = {}
    for name, cache in kv_caches.items():
        if cache.dim() > 1 and cache.shape[0] == num_blocks:
            rows[name] = _row(name, cache)
        elif cache.dim() > 1 and cache.shape[0] == len(_HALVES) and cache.shape[1] == num_blocks:
            rows |= {f"{name}.{half}": _row(name, cache[index]) for index, half in enumerate(_HALVES)}
        else:
            raise BackendError(
                f"KV cache {name} has shape {tuple(cache.shape)}; allowed are [{num_blocks}, ...] and "
                f"[2, {num_blocks}, ...]"
            )
    return rows


def _row(name: str, cache: torch.Tensor) -> torch.Tensor:
    inner = sorted(range(1, cache.dim()), key=cache.stride, reverse=True)
    in_memory_order = cache.permute(0, *inner)
    if not in_memory_order.is_contiguous():
        raise BackendError(f"KV cache {name} has strides {cache.stride()}; each block must be one piece of memory")
    return in_memory_order.reshape(cache.shape[0], -1).view(torch.uint8)
