"""Blocks of random bytes with their seals, and engine memory to keep them in."""

import random
from dataclasses import dataclass

import torch

from kvcontrol.core.ids import BlockHash
from kvcontrol.kv_runtime import BlockRecord, BlockSeal, HostArena, checksum


@dataclass(frozen=True, slots=True)
class Block:
    """A block's bytes and what says that they are those."""

    data: bytes
    seal: BlockSeal


def random_block(rng: random.Random, block_bytes: int, *, tenant: str = "tenant") -> Block:
    """Return bytes that nothing holds by accident; never zeros."""
    data = rng.randbytes(block_bytes)
    record = BlockRecord(
        key=BlockHash(rng.randbytes(16)),
        parent=BlockHash(rng.randbytes(16)) if rng.random() < 0.8 else None,
        tokens=rng.randbytes(4 * rng.randint(1, 64)),
        tenant=tenant,
    )
    return Block(data, BlockSeal(record, checksum(data)))


def put(arena: HostArena, slot: int, data: bytes) -> None:
    """Fill an arena slot."""
    with arena.view(slot) as view:
        view[:] = data


def get(arena: HostArena, slot: int) -> bytes:
    """Return what an arena slot holds."""
    with arena.view(slot) as view:
        return bytes(view)


def pool_rows(
    shape: tuple[int, int, int], *, pages: int = 1, device: str = "cpu", name: str = "0"
) -> dict[str, torch.Tensor]:
    """Return random engine memory as LMDeploy hands it out; ``shape`` is rows, blocks, bytes of a page."""
    rows, blocks, page_bytes = shape
    pool = torch.randint(0, 256, (rows, blocks * pages, page_bytes), dtype=torch.uint8, device=device)
    if pool.is_cuda:
        torch.cuda.synchronize()  # backends don't wait for the engine's work unless they are told to
    return {f"cache_pool.{name}.row.{row}": pool[row] for row in range(rows)}
