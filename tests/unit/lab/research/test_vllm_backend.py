from importlib.util import find_spec

import pytest
import torch

from kvcontrol.kv_runtime import BackendError, BlockStatus, HostArena, Move
from kvcontrol.kv_runtime.backends.torch import TorchBackend
from lab.research.vllm_backend import vllm_backend, vllm_rows
from tests.support.kv_blocks import get

BLOCKS, TOKENS, HEADS, DIM = 10, 16, 4, 8


def _caches(*shape: int, layers: int = 3) -> dict[str, torch.Tensor]:
    return {f"layers.{layer}": torch.randn(shape).to(torch.bfloat16) for layer in range(layers)}


CACHES = {
    "keys before values": _caches(2, BLOCKS, TOKENS, HEADS, DIM),
    "side by side": _caches(BLOCKS, 2, TOKENS, HEADS, DIM),
    "latent": _caches(BLOCKS, TOKENS, DIM),
    "heads first in memory": {
        name: cache.transpose(2, 3) for name, cache in _caches(BLOCKS, 2, HEADS, TOKENS, DIM).items()
    },
}


@pytest.mark.parametrize("layout", list(CACHES))
def test_blocks_move_in_every_layout(layout: str) -> None:
    caches = CACHES[layout]
    axis = 1 if layout == "keys before values" else 0
    backend = TorchBackend(vllm_rows(caches, num_blocks=BLOCKS))
    arena = HostArena(slots=2, block_bytes=backend.block_bytes)
    before = {name: cache.clone() for name, cache in caches.items()}
    assert sum(cache.nbytes for cache in caches.values()) == BLOCKS * backend.block_bytes
    assert backend.read([Move(3, 0)], arena) == [BlockStatus.OK]
    assert backend.write([Move(7, 0)], arena) == [BlockStatus.OK]
    assert backend.read([Move(7, 1)], arena) == [BlockStatus.OK]
    assert get(arena, 0) == get(arena, 1)
    for name, cache in caches.items():
        expected = before[name].index_copy(axis, torch.tensor([7]), before[name].narrow(axis, 3, 1))
        assert torch.equal(cache, expected)
    arena.close()


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (torch.zeros(BLOCKS), r"shape \(10,\); allowed are \[10, ...\] and \[2, 10, ...\]"),
        (torch.zeros(3, BLOCKS, 4), "shape"),
        (torch.zeros(BLOCKS, 8)[:, ::2], "strides"),
        (torch.zeros(8, BLOCKS).T, "strides"),
    ],
)
def test_another_layout_is_refused(cache: torch.Tensor, words: str) -> None:
    with pytest.raises(BackendError, match=words):
        vllm_rows({"layers.0": cache}, num_blocks=BLOCKS)


def test_without_vllm_it_says_so() -> None:
    if find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    with pytest.raises(BackendError, match="vLLM is not installed"):
        vllm_backend(CACHES["latent"], num_blocks=BLOCKS)
