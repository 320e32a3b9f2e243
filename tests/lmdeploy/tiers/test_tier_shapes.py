"""Engines of other shapes over the same tiers: chunked prefill, no prefix cache, small pages, NVMe, hardly any room."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines.control.operations import SNAPSHOT
from engines.lmdeploy.http.admin import ControlClient
from engines.lmdeploy.offload import transfers
from engines.lmdeploy.offload.save_health import FAILING_SAVES
from engines.lmdeploy.offload.setup import TierSetupError
from kvcontrol import agent as agent_module
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.control import Snapshot
from kvcontrol.kv_runtime import KvRuntimeError
from tests.support.kv_events import held_by_tier, replay
from tests.support.models import random_prompt
from tests.support.tiered_engine import NEW_TOKENS, PROMPTS, TieredEngine, since, visit

pytestmark = pytest.mark.engine

WITHIN_S = 60.0


@pytest.fixture
def settings(tier_settings: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The module's settings, to be changed for one test."""
    del tier_settings
    return monkeypatch


@pytest.mark.parametrize(
    "shape",
    [
        {"max_prefill_token_num": 64},
        {"enable_prefix_caching": False},
        {"block_size": 32, "kernel_block_size": 16, "num_gpu_blocks": 16},
    ],
    ids=["chunked prefill", "no prefix cache", "pages smaller than blocks"],
)
def test_an_engine_of_another_shape_restores_right_tokens(
    tiny_llama: Path, settings: pytest.MonkeyPatch, expected: list[list[int]], shape: dict[str, Any]
) -> None:
    del settings
    with TieredEngine.start(tiny_llama, **shape) as tiered:
        visit(tiered, expected)
        assert tiered.run(*PROMPTS * 2, new_tokens=NEW_TOKENS) == expected * 2
        tiered.check()
        assert tiered.offload.loads >= len(PROMPTS)
        assert tiered.offload.failed_loads == tiered.offload.guard_errors == 0


@pytest.mark.parametrize("quant_policy", [8, 16], ids=["int8", "fp8"])
def test_quantised_kv_comes_back_as_it_was_stored(
    tiny_llama: Path, settings: pytest.MonkeyPatch, quant_policy: int
) -> None:
    del settings
    with TieredEngine.start(tiny_llama, quant_policy=quant_policy, num_gpu_blocks=256) as roomy:
        expected = [roomy.run(prompt, new_tokens=NEW_TOKENS)[0] for prompt in PROMPTS]
    with TieredEngine.start(tiny_llama, quant_policy=quant_policy) as tiered:
        visit(tiered, expected)
        tiered.check()
        assert tiered.offload.loads >= len(PROMPTS)
        assert tiered.offload.failed_loads == tiered.offload.guard_errors == 0


def test_events_tell_what_each_tier_holds_and_nvme_is_written_while_the_engine_idles(
    tiny_llama: Path, settings: pytest.MonkeyPatch, tmp_path: Path, expected: list[list[int]]
) -> None:
    settings.setenv("KVGATE_ENGINE_CONTROL_ENDPOINT", f"ipc://{tmp_path}/control")
    settings.setenv("KVGATE_ENGINE_DDR_BYTES", str(48 * 8192))
    settings.setenv("KVGATE_ENGINE_NVME_PATH", str(tmp_path))
    settings.setenv("KVGATE_ENGINE_NVME_BYTES", str(256 * 8192))
    with TieredEngine.start(tiny_llama) as tiered:
        visit(tiered, expected, rounds=1)
        tiered.check()
        assert tiered.hierarchy.stats().tiers[CacheTier.NVME].used_blocks > 100
        visit(tiered, expected)
        tiered.check()
        client = ControlClient(f"ipc://{tmp_path}/control", timeout_s=WITHIN_S)
        state = msgspec.json.decode(client.ask_now(SNAPSHOT, timeout_s=WITHIN_S), type=Snapshot)
        client.close()
        told = {tier: set(state.hashes(tier)) for tier in state.tiers}
        there: dict[CacheTier, set[Any]] = {}
        for block_id, record in tiered.hierarchy.blocks():
            for tier in tiered.hierarchy.locate(block_id):
                there.setdefault(tier, set()).add(record.key)
        hbm = told.pop(CacheTier.HBM)
        assert told == there
        assert set(there) == {CacheTier.DDR, CacheTier.NVME}
        assert held_by_tier(replay(tiered.agent.publisher.replay_endpoint)) == {CacheTier.HBM: hbm, **there}
        paths = tiered.offload.paths
        assert paths["nvme_to_ddr"].moved_blocks > 0
        assert all(path.failed_blocks == 0 for path in paths.values())


def test_a_ddr_tier_with_hardly_any_room_neither_spins_nor_fails(
    tiny_llama: Path, settings: pytest.MonkeyPatch, expected: list[list[int]]
) -> None:
    settings.setenv("KVGATE_ENGINE_DDR_BYTES", str(8 * 8192))
    with TieredEngine.start(tiny_llama) as tiered:
        for _ in range(2):
            assert tiered.run(*PROMPTS * 2, new_tokens=NEW_TOKENS) == expected * 2
        tiered.check()
        assert tiered.hierarchy.stats().tiers[CacheTier.DDR].capacity_blocks <= 8


def test_a_runtime_without_an_end_is_given_up_and_the_engine_goes_on(
    tiny_llama: Path, settings: pytest.MonkeyPatch, expected: list[list[int]]
) -> None:
    settings.setenv("KVGATE_ENGINE_LOAD_DEADLINE_S", "0.5")
    settings.setattr(transfers, "GRACE_S", 0.5)
    with TieredEngine.start(tiny_llama) as tiered:
        visit(tiered, expected, rounds=1)
        tiered.rest()

        def broken() -> Any:
            raise RuntimeError("nothing is ever known")

        with settings.context() as patch:
            patch.setattr(tiered.hierarchy, "poll", broken)
            tiered.evict_hbm()
            assert tiered.run(*PROMPTS, new_tokens=NEW_TOKENS) == expected
            before = tiered.offload
            assert tiered.run(*PROMPTS, new_tokens=NEW_TOKENS) == expected
            assert since(before, tiered, "loads") == since(before, tiered, "failed_loads") == 0
            assert not tiered.scheduler.kv_save_coordinator._leases
        assert tiered.used_hbm_blocks() == tiered.trie_blocks()


@pytest.mark.parametrize("block_size", [1024, 2048])
def test_blocks_of_many_tokens_are_kept_in_every_tier_and_found_again(
    tiny_llama: Path, settings: pytest.MonkeyPatch, tmp_path: Path, block_size: int
) -> None:
    settings.setattr(agent_module, "PROBE_EVERY_S", 0.0)
    settings.setenv("KVGATE_ENGINE_DDR_PATH", str(tmp_path / "ddr"))
    settings.setenv("KVGATE_ENGINE_NVME_PATH", str(tmp_path))
    settings.setenv("KVGATE_ENGINE_NVME_BYTES", str(64 << 20))
    shape = {"block_size": block_size, "num_gpu_blocks": 17, "session_len": 3 * block_size, "max_batch_size": 2}
    prompt = random_prompt(2 * block_size + 50, 9)
    with TieredEngine.start(tiny_llama, **shape) as tiered:
        [first] = tiered.run(prompt)
        tiered.rest()
        stats = tiered.hierarchy.stats()
        assert {tier.used_blocks for tier in stats.tiers.values()} == {2}, stats
        assert (tiered.offload.guard_errors, tiered.offload.failed_saves_in_a_row) == (0, 0)
        tiered.evict_hbm()
        assert tiered.run(prompt) == [first]
        assert tiered.cached == [0, 2 * block_size]
        tiered.check()
    with TieredEngine.start(tiny_llama, **shape) as again:
        assert again.run(prompt) == [first]
        assert again.cached == [2 * block_size]


def test_saves_that_all_fail_are_reported_with_their_reason_until_one_arrives(
    tiny_llama: Path, settings: pytest.MonkeyPatch, faults: Callable[..., None]
) -> None:
    del settings
    faults(engine_read={"fail": 1.0})
    with TieredEngine.start(tiny_llama) as tiered:
        for seed in range(FAILING_SAVES):
            tiered.run(random_prompt(40, seed))
            tiered.rest()
        assert tiered.offload.failed_saves_in_a_row >= FAILING_SAVES
        assert tiered.offload.save_failure == "blocks can't be saved: device"
        faults()
        tiered.run(random_prompt(40, 99))
        tiered.rest()
        assert (tiered.offload.failed_saves_in_a_row, tiered.offload.save_failure) == (0, "")


def test_tiers_that_can_not_be_built_stop_the_start_and_say_why(
    tiny_llama: Path, settings: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings.setenv("KVGATE_ENGINE_DDR_BYTES", "40000")
    with pytest.raises(TierSetupError, match="KVGATE_ENGINE_DDR_BYTES=40000 is 4 blocks of 8192 bytes; at least 8"):
        TieredEngine.start(tiny_llama)
    settings.setenv("KVGATE_ENGINE_DDR_BYTES", "80000")
    settings.setenv("KVGATE_ENGINE_DDR_PATH", str(tmp_path / "no" / "folder"))
    with pytest.raises(KvRuntimeError, match="no/folder"):
        TieredEngine.start(tiny_llama)


def test_a_slow_tier_is_left_alone_once_it_was_measured_and_tried_again_later(
    tiny_llama: Path, settings: pytest.MonkeyPatch, expected: list[list[int]], faults: Callable[..., None]
) -> None:
    settings.setattr(agent_module, "PROBE_EVERY_S", 1e9)
    faults(engine_write={"delay_s": 3.0})
    with TieredEngine.start(tiny_llama) as tiered:

        def revisit(place: int) -> None:
            tiered.rest()
            tiered.evict_hbm()
            assert tiered.run(PROMPTS[place], new_tokens=NEW_TOKENS) == [expected[place]]

        for _ in range(2):
            revisit(0)
        assert (tiered.offload.loads, tiered.offload.declined_loads) == (1, 0)
        revisit(1)
        revisit(1)
        assert tiered.offload.loads == 1
        assert tiered.offload.declined_loads > 0
        settings.setattr(agent_module, "PROBE_EVERY_S", 0.0)
        revisit(1)
        assert tiered.offload.loads == 2
        tiered.check()


def test_a_tier_that_turns_slow_is_left_alone_after_a_load_or_two(
    tiny_llama: Path, settings: pytest.MonkeyPatch, expected: list[list[int]], faults: Callable[..., None]
) -> None:
    settings.setattr(agent_module, "PROBE_EVERY_S", 0.0)  # a tiny model computes faster than anything loads
    with TieredEngine.start(tiny_llama) as tiered:

        def revisit(place: int) -> None:
            tiered.rest()
            tiered.evict_hbm()
            assert tiered.run(PROMPTS[place], new_tokens=NEW_TOKENS) == [expected[place]]

        for place in range(6):
            revisit(place)
            revisit(place)
        fast = tiered.offload
        assert fast.loads >= 6
        tiered.door.prefill.tokens_per_s = 200.0  # so that loading is what pays, as long as the tier is quick
        settings.setattr(agent_module, "PROBE_EVERY_S", 1e9)
        revisit(0)
        assert tiered.offload.loads == fast.loads + 1
        assert tiered.offload.declined_loads == fast.declined_loads
        faults(engine_write={"delay_s": 2.0})
        for _ in range(4):
            tiered.door.prefill.tokens_per_s = 200.0
            revisit(0)
        assert tiered.offload.loads <= fast.loads + 1 + 2
        assert tiered.offload.declined_loads > fast.declined_loads
        tiered.check()
