"""Pinned prefixes of a real engine stay, whatever comes and whichever policy decides, until somebody says otherwise."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.lmdeploy.trie.eviction import eviction_of
from engines.lmdeploy.trie.pins import TriePins
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.hashing import chain_hashes, root_hash, token_bytes
from kvcontrol.core.ids import BlockHash
from kvcontrol.kv_policy import make_policy
from tests.support.models import random_prompt
from tests.support.tiered_engine import BLOCK, TieredEngine

pytestmark = pytest.mark.engine

POOL_BLOCKS = 32
HBM, DDR = CacheTier.HBM, CacheTier.DDR
KEPT, CONTROL = random_prompt(6 * BLOCK + 1, 1), random_prompt(6 * BLOCK + 1, 2)
TEN_POOLS = [random_prompt(12 * BLOCK + 1, seed) for seed in range(100, 127)]


@pytest.fixture
def engine(tiny_llama: Path, _hooks: None) -> Iterator[TieredEngine]:
    """A pool of 32 blocks and DDR of 64, of which the longest request leaves 15 for pins."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVGATE_ENGINE_PIN_SHARE", "0.5")
        patch.setenv("KVGATE_ENGINE_DDR_BYTES", str(64 * 8192))
        with TieredEngine.start(tiny_llama, num_gpu_blocks=POOL_BLOCKS, session_len=16 * BLOCK) as started:
            yield started


def pins(engine: TieredEngine) -> TriePins:
    return engine.agent.pins


def between_steps(engine: TieredEngine, work: Callable[[], Any]) -> Any:
    async def run() -> Any:
        return work()

    return engine.do(run)


def keys_of(engine: TieredEngine, prompt: list[int]) -> list[BlockHash]:
    identity = engine.agent.tracker.identity
    return chain_hashes(root_hash(identity), token_bytes(prompt), identity.block_size_tokens)


def visit(engine: TieredEngine, prompt: list[int]) -> int:
    """Ask, and return how many tokens HBM had."""
    before = engine.local.hit_tokens
    engine.run(prompt, new_tokens=1)
    return engine.local.hit_tokens - before


def test_a_pinned_prefix_outlives_ten_pools_and_swaps_and_is_a_miss_once_invalidated(engine: TieredEngine) -> None:
    keys = keys_of(engine, KEPT)
    visit(engine, KEPT)
    between_steps(engine, lambda: pins(engine).pin(keys, None))
    visit(engine, CONTROL)
    eviction = eviction_of(engine.scheduler.block_trie)
    assert eviction is not None
    for place, prompt in enumerate(TEN_POOLS):
        if place in {9, 18}:
            name = "s3fifo" if place == 9 else "adaptive"
            between_steps(engine, lambda name=name: eviction.swap(make_policy(name, capacity_blocks=POOL_BLOCKS)))
        visit(engine, prompt)
    engine.rest()
    assert set(keys_of(engine, CONTROL)).isdisjoint(engine.resident()[HBM] | engine.resident()[DDR])
    assert visit(engine, CONTROL) == 0
    assert visit(engine, KEPT) == 6 * BLOCK
    [pin] = pins(engine).report().pins
    assert (pin.tiers, pin.missing) == ({HBM: 6, DDR: 6}, 0)
    assert engine.agent.counters().pinned_blocks == {HBM: 6, DDR: 6}
    between_steps(engine, pins(engine).check_integrity)

    engine.rest()
    done = between_steps(engine, lambda: pins(engine).invalidate(keys))
    assert (done.in_use_blocks, done.unpinned) == (0, [keys[-1].hex()])
    assert done.dropped[HBM] >= 6
    assert done.dropped[DDR] >= 6
    assert visit(engine, KEPT) == 0
    assert not eviction.errors
    engine.check()


def test_what_is_invalidated_while_it_is_used_goes_with_what_was_saved_of_it(engine: TieredEngine) -> None:
    keys = keys_of(engine, KEPT)
    done: list[Any] = []

    async def both() -> None:
        async def invalidate(_: int) -> None:
            while keys[-1] not in engine.resident().get(HBM, ()):  # it is bounded by ``do``
                await asyncio.sleep(0.01)
            done.append(pins(engine).invalidate(keys))
            await asyncio.sleep(0.01)

        await engine.ask(KEPT, new_tokens=100, cancel=invalidate)

    engine.do(both)
    assert done[0].in_use_blocks >= 6
    engine.rest()

    async def gone() -> None:
        while any(keys[0] in held for held in engine.resident().values()):
            pins(engine).work()  # as an instance's timer does
            await asyncio.sleep(0.01)

    engine.do(gone)
    assert visit(engine, KEPT) == 0
    engine.check()
