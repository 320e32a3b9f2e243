"""Eviction through a policy inside a running engine: a pool too small for what is asked of it, and equal tokens."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.lmdeploy.trie.eviction import TrieEviction, eviction_of
from kvcontrol.kv_policy import LruPolicy
from lab.research.naive_lru import NaiveLruPolicy
from tests.support.engine import ANSWER_WITHIN_S, LocalEngine, Sampling
from tests.support.models import random_prompt

pytestmark = pytest.mark.engine

BLOCK = 16
SHORT = Sampling(new_tokens=4)


@pytest.fixture(scope="module", autouse=True)
def _hooks(_cpu_engine: None) -> Iterator[None]:
    from engines.lmdeploy.hooks import eviction_hooks
    from engines.lmdeploy.patching import install

    undo = install(eviction_hooks())
    yield
    undo()


class Pool:
    """A running engine, its eviction, and who lost a block while using it (nobody should)."""

    def __init__(self, local: LocalEngine) -> None:
        self.local = local
        self.scheduler = local.engine.scheduler
        self.trie = self.scheduler.block_trie
        self.robbed: list[int] = []
        self.evictions = 0
        evict = self.trie.evict

        def watched(max_num_blocks: int) -> int:
            before = {sequence.seq_id: self._blocks(sequence) for sequence in self._sequences()}
            freed = int(evict(max_num_blocks))
            self.evictions += freed > 0
            counts = self.trie.allocator._log_mem.ref_count
            self.robbed += [each for each, blocks in before.items() if (counts[blocks] < 1).any()]
            return freed

        self.trie.evict = watched

    @property
    def eviction(self) -> TrieEviction:
        eviction = eviction_of(self.trie)
        assert eviction is not None
        return eviction

    def _sequences(self) -> list[Any]:
        return list(self.scheduler.seq_manager._seq_map.values())

    @staticmethod
    def _blocks(sequence: Any) -> "np.ndarray[Any, np.dtype[np.int64]]":
        return np.array(sequence.logical_blocks.get_real_blocks())

    def held_blocks(self, prompt: Sequence[int]) -> int:
        node, found = self.trie._roots.get(None), 0
        while node is not None:
            part = list(prompt[found * BLOCK : (found + 1) * BLOCK])
            node = next((child for child in node.children.values() if child.token_ids.tolist() == part), None)
            found += node is not None
        return found

    def check(self) -> None:
        self.eviction.check_integrity(self.trie)
        assert self.robbed == []
        policy = self.eviction.policy
        if isinstance(policy, LruPolicy):  # what it may choose: all that only the trie holds, every free leaf among it
            counts = self.trie.allocator._log_mem.ref_count
            assert {leaf.block_id for leaf in self.trie.leaves if counts[leaf.block_id] == 1} <= policy._line.keys()
            assert all(counts[block] == 1 for block in policy._line)
        assert not self._sequences()

    def cancelled(self, prompt: Sequence[int], *, after_tokens: int, session: int) -> None:
        from lmdeploy.messages import GenerationConfig

        async def run() -> None:
            instance = self.local.engine.create_instance()
            config = GenerationConfig(max_new_tokens=60, top_k=1, ignore_eos=True)
            seen = 0
            async with asyncio.timeout(ANSWER_WITHIN_S):
                async for output in instance.async_stream_infer(session, list(prompt), gen_config=config):
                    seen += len(output.token_ids)
                    if seen >= after_tokens:
                        await instance.async_cancel(session)

        self.local.runner.run(run())


def start(model: Path, blocks: int, **config: Any) -> LocalEngine:
    settings = {"num_gpu_blocks": blocks, "enable_prefix_caching": True, "max_batch_size": 4, **config}
    return LocalEngine.start(model, **settings)


@pytest.fixture
def small(tiny_llama: Path) -> Iterator[Pool]:
    with start(tiny_llama, 32) as local:
        yield Pool(local)


def test_prompts_leave_in_the_order_of_their_last_use(small: Pool) -> None:
    prompts = [random_prompt(4 * BLOCK + 1, seed) for seed in range(6)]
    for prompt in prompts:
        small.local.generate([prompt], SHORT)
    small.local.generate([prompts[0]], SHORT)  # now the youngest
    order = [1, 2, 3, 4, 5, 0]
    for turn in range(6):
        small.local.generate([random_prompt(4 * BLOCK + 1, 50 + turn)], SHORT)
        held = [small.held_blocks(prompts[seed]) for seed in order]
        assert held == sorted(held)  # what was used later has lost no block before what was used earlier
        small.check()
    assert small.held_blocks(prompts[1]) == 0


def test_a_prefix_that_is_used_all_the_time_survives_a_flood_of_prompts_used_once(small: Pool) -> None:
    hot = random_prompt(8 * BLOCK, 0)
    small.local.generate([hot], SHORT)
    for turn in range(25):
        small.local.generate([random_prompt(9 * BLOCK, 100 + turn)], SHORT)
        hits = small.local.hit_tokens
        small.local.generate([[*hot, turn + 1]], SHORT)
        assert small.local.hit_tokens - hits == 8 * BLOCK
    assert small.evictions > 10
    small.check()


def requests(seed: int, turns: int) -> list[list[tuple[list[int], Sampling]]]:
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    shared = [random_prompt(BLOCK * blocks, 900 + blocks) for blocks in (2, 4, 6)]
    return [
        [
            (
                [*rng.choice([[], *shared]), *random_prompt(rng.randint(3, 5 * BLOCK), rng.randint(0, 6))],
                Sampling(new_tokens=rng.randint(1, 3 * BLOCK)),
            )
            for _ in range(rng.randint(1, 4))
        ]
        for _ in range(turns)
    ]


@pytest.mark.parametrize("policy", [None, NaiveLruPolicy], ids=["lru", "replaced"])
def test_a_random_workload_with_cancels_gets_the_tokens_of_a_run_without_eviction(
    tiny_llama: Path, policy: type[NaiveLruPolicy] | None
) -> None:
    workload = requests(seed=11, turns=14)
    with start(tiny_llama, 600) as local:
        roomy = Pool(local)
        expected = [local.generate_each(turn) for turn in workload]
        assert roomy.evictions == 0
    with start(tiny_llama, 24) as local:
        pool = Pool(local)
        for number, turn in enumerate(workload):
            if number == 5 and policy is not None:
                pool.eviction.swap(policy())
            assert local.generate_each(turn) == expected[number]
            pool.cancelled(turn[0][0], after_tokens=1 + number % 20, session=10_000 + number)
            pool.check()
        assert pool.evictions > 10
        assert pool.eviction.evicted_blocks > 50
        assert local.hit_tokens > 0
        assert pool.trie.evict(1_000) > 0
        assert len(pool.eviction.policy) == 0
        blocks = pool.scheduler.block_manager
        assert (
            blocks.get_num_free_gpu_blocks()
            == blocks.num_gpu_blocks - local.engine.cache_config.num_reserved_gpu_blocks
        )


def test_an_engine_whose_policy_fails_goes_on_with_lmdeploys_own_eviction(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(LruPolicy):
        def select_victims(self, context: Any) -> Any:
            raise OSError(f"nothing of {context.wanted_blocks} today")

    workload = requests(seed=5, turns=8)
    with start(tiny_llama, 600) as local:
        expected = [local.generate_each(turn) for turn in workload]
    with start(tiny_llama, 24) as local:
        pool = Pool(local)
        pool.eviction.swap(Failing())
        assert [local.generate_each(turn) for turn in workload] == expected
        assert pool.eviction.errors == 1
        assert pool.evictions > 3
        assert pool.robbed == []
    assert "LMDeploy's own eviction takes over" in caplog.text
