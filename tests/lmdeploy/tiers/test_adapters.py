"""LoRA adapters on one engine: each answers as its weights say, and KV is found by equal contents alone."""

import shutil
from pathlib import Path

import pytest

from kvcontrol.core.blocks import CacheTier
from tests.support.adapters import merged, write_adapter
from tests.support.models import greedy_reference, random_prompt
from tests.support.tiered_engine import NEW_TOKENS, TieredEngine

pytestmark = pytest.mark.engine

PROMPT = random_prompt(200, 11)
SHORT = random_prompt(40, 12)
FULL = 192
"""Tokens of the prompt's blocks that can be found."""


@pytest.fixture
def adapters(tiny_llama: Path, tmp_path: Path) -> dict[str, str]:
    return {
        name: str(write_adapter(tiny_llama, tmp_path / name, seed=seed))
        for seed, name in enumerate(("first", "second"))
    }


@pytest.fixture
def _disk(tier_settings: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Engines of a test are started over one disk."""
    del tier_settings
    monkeypatch.setattr("kvcontrol.agent.PROBE_EVERY_S", 0.0)
    monkeypatch.setenv("KVGATE_ENGINE_NVME_PATH", str(tmp_path / "nvme"))
    monkeypatch.setenv("KVGATE_ENGINE_NVME_BYTES", str(8 << 20))
    monkeypatch.setenv("KVGATE_ENGINE_EVENTS_ENDPOINT", "tcp://127.0.0.1:*")


def test_each_adapter_answers_like_a_model_with_it_in_its_weights_whoever_is_in_the_batch(
    tiny_llama: Path, adapters: dict[str, str], tier_settings: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    del tier_settings
    asked = [("first", SHORT), (None, SHORT), ("second", SHORT), ("second", PROMPT), (None, PROMPT), ("first", PROMPT)]

    def reference(adapter: str | None, prompt: list[int]) -> list[int]:
        model = tiny_llama
        if adapter is not None:
            model = tmp_path / f"merged-{adapter}"
            if not model.exists():
                merged(tiny_llama, Path(adapters[adapter]), model)
        return greedy_reference(model, [prompt], NEW_TOKENS)[0]

    expected = [reference(adapter, prompt) for adapter, prompt in asked]
    assert len({tuple(tokens) for tokens in expected}) == len(asked)
    with TieredEngine.start(tiny_llama, adapters=adapters, num_gpu_blocks=128) as tiered:

        async def all_at_once() -> list[list[int]]:
            import asyncio

            return await asyncio.gather(
                *(tiered.ask(prompt, new_tokens=NEW_TOKENS, adapter=adapter) for adapter, prompt in asked)
            )

        assert tiered.do(all_at_once) == expected
        assert tiered.do(all_at_once) == expected


def test_a_model_and_its_adapters_share_no_block_in_any_tier(
    tiny_llama: Path, adapters: dict[str, str], tier_settings: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    del tier_settings
    monkeypatch.setattr("kvcontrol.agent.PROBE_EVERY_S", 0.0)
    with TieredEngine.start(tiny_llama, adapters=adapters, num_gpu_blocks=128) as tiered:
        hits, first_time = 0, {}
        for adapter in (None, "first", "second"):
            [first_time[adapter]] = tiered.run(PROMPT, new_tokens=NEW_TOKENS, adapter=adapter)
            assert tiered.local.hit_tokens == hits
            assert tiered.offload.found_tokens == 0
            tiered.rest()
        below = tiered.resident()[CacheTier.DDR]
        assert len(below) >= 3 * (FULL // 16)
        tiered.evict_hbm()
        for times, adapter in enumerate((None, "first", "second"), 1):
            assert tiered.run(PROMPT, new_tokens=NEW_TOKENS, adapter=adapter) == [first_time[adapter]]
            assert tiered.offload.found_tokens == times * FULL


@pytest.mark.usefixtures("_disk")
def test_an_adapters_blocks_are_found_after_a_restart_with_the_same_files_and_with_no_others(
    tiny_llama: Path, adapters: dict[str, str], tmp_path: Path
) -> None:
    def restarted(adapter: str | None, served: dict[str, str] | None) -> tuple[int, list[int]]:
        with TieredEngine.start(tiny_llama, adapters=served) as tiered:
            [tokens] = tiered.run(PROMPT, new_tokens=NEW_TOKENS, adapter=adapter)
            found = tiered.offload.found_tokens
            tiered.rest()
        return found, tokens

    one = {"mine": adapters["first"]}
    found, before = restarted("mine", one)
    assert found == 0
    assert restarted("mine", one) == (FULL, before)
    moved = shutil.copytree(adapters["first"], tmp_path / "moved")
    assert restarted("mine", {"mine": str(moved)}) == (FULL, before)
    found, base = restarted(None, one)
    assert found == 0
    assert base != before
    found, other = restarted("mine", {"mine": adapters["second"]})
    assert found == 0
    assert other not in (base, before)
    assert restarted("mine", one)[1] == before
