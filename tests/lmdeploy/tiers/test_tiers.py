"""The tiers below a real engine: restored KV gives the tokens of a run that never evicted."""

import asyncio
from collections.abc import Callable

import pytest
import torch

from engines.lmdeploy.schedule.uncached import left_tokens
from engines.lmdeploy.trie.path import TriePath
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.tenant import SHARED_TENANT, tenant_of_salt
from tests.support.models import random_prompt
from tests.support.tiered_engine import BLOCK, NEW_TOKENS, PROMPTS, TieredEngine, since, visit

pytestmark = pytest.mark.engine


def test_restored_contexts_give_the_tokens_of_a_run_that_never_evicted(
    tiered: TieredEngine, expected: list[list[int]]
) -> None:
    before = tiered.offload
    visit(tiered, expected, rounds=3)
    tiered.check()
    assert since(before, tiered, "loads") >= 12
    assert since(before, tiered, "failed_loads") == since(before, tiered, "guard_errors") == 0
    assert tiered.hierarchy.stats().tiers[CacheTier.DDR].used_blocks > 100


def test_identical_prompts_at_once_over_a_tiny_pool_all_get_the_same_tokens(
    tiered: TieredEngine, expected: list[list[int]]
) -> None:
    visit(tiered, expected, rounds=1)
    for place in (0, 3):
        tiered.evict_hbm()
        answers = tiered.run(*[PROMPTS[place]] * 16, new_tokens=NEW_TOKENS)
        assert answers == [expected[place]] * 16
    mixed = tiered.run(*PROMPTS * 3, new_tokens=NEW_TOKENS)
    assert mixed == expected * 3


def test_blocks_that_decoding_filled_are_found_by_the_next_turn(tiered: TieredEngine) -> None:
    prompt = PROMPTS[0]
    [answer] = tiered.run(prompt, new_tokens=40)
    tiered.check()
    before = tiered.offload
    following = [*prompt, *answer, *random_prompt(20, 77)]
    tiered.evict_hbm()
    [restored] = tiered.run(following)
    known_blocks = (len(prompt) + len(answer) - 1) // BLOCK  # the last token was never an input
    assert known_blocks > len(prompt) // BLOCK
    assert since(before, tiered, "found_tokens") >= known_blocks * BLOCK
    assert since(before, tiered, "loads") == 1
    tiered.forget_all()
    assert tiered.run(following) == [restored]


def test_two_tenants_never_share_a_block_and_each_finds_its_own(tiered: TieredEngine) -> None:
    prompt = PROMPTS[1]
    first = tiered.run(prompt, salt="tenant-a")
    tiered.rest()
    before = tiered.offload
    for salt in ("tenant-b", ""):
        tiered.evict_hbm()
        assert tiered.run(prompt, salt=salt) == first
        tiered.rest()
    assert since(before, tiered, "found_tokens") == since(before, tiered, "loads") == 0
    tiered.evict_hbm()
    assert tiered.run(prompt, salt="tenant-a") == first
    assert since(before, tiered, "loads") == 1
    tiered.check()
    used = {
        tenant: usage.used_blocks for tenant, usage in tiered.hierarchy.stats().tiers[CacheTier.DDR].tenants.items()
    }
    blocks = (len(prompt) + 8 - 1) // BLOCK
    assert [used[name] for name in (tenant_of_salt("tenant-a"), tenant_of_salt("tenant-b"), SHARED_TENANT)] == [
        blocks
    ] * 3
    assert not any("tenant" in name for name in used)


def test_what_the_engine_forgets_when_it_sleeps_is_restored_when_it_wakes(
    tiered: TieredEngine, expected: list[list[int]], faults: Callable[..., None]
) -> None:
    visit(tiered, expected, rounds=1)
    tiered.rest()
    below = tiered.resident()[CacheTier.DDR]
    tiered.do(lambda: tiered.local.engine.sleep(1))
    assert tiered.resident() == {CacheTier.DDR: below}
    tiered.local.engine.wakeup()
    before = tiered.offload
    visit(tiered, expected, rounds=1)
    assert since(before, tiered, "loads") == len(PROMPTS)
    # and in the middle of loads and saves
    faults(engine_write={"delay_s": 0.2}, engine_read={"delay_s": 0.2})
    tiered.evict_hbm()

    async def sleep_in_between() -> None:
        asking = [asyncio.create_task(tiered.ask(prompt, new_tokens=NEW_TOKENS)) for prompt in PROMPTS]
        while not tiered.scheduler.kv_load_coordinator._loads:
            await asyncio.sleep(0.001)
        await tiered.local.engine.sleep(1)
        await asyncio.gather(*asking, return_exceptions=True)

    tiered.do(sleep_in_between)
    faults()
    tiered.local.engine.wakeup()
    tiered.check()
    visit(tiered, expected, rounds=1)


def test_other_weights_find_nothing_of_the_old_ones(tiered: TieredEngine, expected: list[list[int]]) -> None:
    visit(tiered, expected, rounds=1)
    tiered.rest()

    async def update() -> None:
        tiered.agent.weights_changed()

    tiered.do(update)
    assert tiered.resident() == {}
    assert not list(tiered.hierarchy.blocks())
    before = tiered.offload
    visit(tiered, expected, rounds=1)
    assert since(before, tiered, "loads") == since(before, tiered, "found_tokens") == 0
    tiered.check()
    tiered.evict_hbm()
    visit(tiered, expected, rounds=1)
    assert since(before, tiered, "loads") > 0


def test_weights_that_change_during_a_load_make_it_useless(
    tiered: TieredEngine, expected: list[list[int]], faults: Callable[..., None]
) -> None:
    visit(tiered, expected, rounds=1)
    tiered.rest()
    tiered.evict_hbm()
    faults(engine_write={"delay_s": 0.2})
    before = tiered.offload

    async def change_in_between() -> list[int]:
        asking = asyncio.create_task(tiered.ask(PROMPTS[0], new_tokens=NEW_TOKENS))
        while not tiered.scheduler.kv_load_coordinator._loads:
            await asyncio.sleep(0.001)
        tiered.agent.weights_changed()
        return await asking

    assert tiered.do(change_in_between) == expected[0]  # the same weights, in truth
    assert since(before, tiered, "failed_loads") == 1
    assert since(before, tiered, "loads") == 0


def test_a_path_of_the_trie_is_made_while_its_blocks_are_loading(
    tiered: TieredEngine, expected: list[list[int]], faults: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = []
    hang = TriePath.hang

    def watched(self: TriePath, node: object, blocks: int) -> object:
        hung.append(hang(self, node, blocks) is not None)
        return self._seq.prefix_cache.trie_cursor if hung[-1] else None

    monkeypatch.setattr(TriePath, "hang", watched)
    visit(tiered, expected, rounds=1)
    tiered.rest()
    faults(engine_write={"delay_s": 0.2})
    tiered.evict_hbm()
    assert tiered.run(PROMPTS[0], new_tokens=NEW_TOKENS) == [expected[0]]
    assert hung[-1:] == [True]
    tiered.check()


def test_cold_prompts_that_are_preempted_and_loaded_again_report_nothing_cached(tiered: TieredEngine) -> None:
    prompts = [random_prompt(87 + 2 * seed, 50 + seed) for seed in range(8)]
    before, preempted = tiered.offload, len(tiered.local.preempted)
    del tiered.cached[:]
    tiered.run(*prompts, new_tokens=200)
    assert len(tiered.local.preempted) > preempted
    assert tiered.cached == [0] * 8
    assert since(before, tiered, "found_tokens") == 0
    assert since(before, tiered, "looked_up_tokens") == sum(
        len(prompt) - 1 - (len(prompt) - 1) % BLOCK for prompt in prompts
    )


def test_what_a_tier_holds_of_a_waiting_prompt_is_known_before_it_is_matched(tiered: TieredEngine) -> None:
    async def computed() -> None:
        for prompt in PROMPTS:
            await tiered.ask(prompt, new_tokens=NEW_TOKENS)

    async def looked_up() -> list[int]:
        from lmdeploy.pytorch.messages import SamplingParam

        session = tiered.scheduler.add_session(10_000)
        try:
            added = [
                session.add_sequence(torch.tensor(prompt), sampling_param=SamplingParam())
                for prompt in (PROMPTS[0], random_prompt(300, 99))
            ]
            return [left_tokens(tiered.scheduler, seq) for seq in added]
        finally:
            tiered.scheduler.end_session(10_000)

    tiered.do(computed)
    tiered.rest()
    assert tiered.do(looked_up) == [290 - 288, 300]
    tiered.rest()
