"""Blocks that an engine left on disk are found by an engine that computes alike, and by no other."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engines.lmdeploy.effective_config import attention_of
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.hashing import root_hash
from tests.support.models import random_prompt
from tests.support.tiered_engine import NEW_TOKENS, TieredEngine

pytestmark = pytest.mark.engine

PROMPT = random_prompt(200, 11)
ROPE = {"rope_parameters": {"rope_theta": 50.0, "rope_type": "default"}}


@pytest.fixture
def restarted(
    tier_settings: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, list[int]]]:
    """Start an engine over the same disk, ask it, and return what the disk gave and what it answered."""
    del tier_settings
    monkeypatch.setattr("kvcontrol.agent.PROBE_EVERY_S", 0.0)
    monkeypatch.setenv("KVGATE_ENGINE_NVME_PATH", str(tmp_path / "nvme"))
    monkeypatch.setenv("KVGATE_ENGINE_NVME_BYTES", str(8 << 20))
    monkeypatch.setenv("KVGATE_ENGINE_EVENTS_ENDPOINT", "tcp://127.0.0.1:*")

    def run(model: Path, **options: Any) -> tuple[int, list[int]]:
        with TieredEngine.start(model, **options) as tiered:
            [tokens] = tiered.run(PROMPT, new_tokens=NEW_TOKENS)
            found = tiered.offload.found_tokens
            tiered.rest()
            assert tiered.hierarchy.stats().tiers[CacheTier.NVME].used_blocks >= len(PROMPT) // 16
        return found, tokens

    return run


def fresh(model: Path, **options: Any) -> list[int]:
    """What an engine without anything cached answers."""
    with TieredEngine.start(model, enable_prefix_caching=False, **options) as plain:
        plain.tiers.forget()
        return plain.run(PROMPT, new_tokens=NEW_TOKENS)[0]


def other_weights(model: Path, folder: Path) -> Path:
    """A model that differs in one number of one tensor, the last one of its file."""
    copy = shutil.copytree(model, folder)
    [path] = copy.glob("*.safetensors")
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if "k_proj" in name)
    tensors[name].view(-1)[-1] += 0.5
    save_file(tensors, path, metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize("change", [{"hf_overrides": ROPE}, {"hf_overrides": {"rms_norm_eps": 0.5}}], ids=str)
def test_other_options_find_nothing_and_answer_like_a_fresh_engine(
    tiny_llama: Path, restarted: Callable[..., tuple[int, list[int]]], change: dict[str, Any]
) -> None:
    found, before = restarted(tiny_llama)
    again, _ = restarted(tiny_llama)
    assert (found, again) == (0, 192)
    found, after = restarted(tiny_llama, **change)
    assert found == 0
    assert after != before
    assert after == fresh(tiny_llama, **change)
    assert restarted(tiny_llama, **change) == (192, after)


def test_weights_that_differ_in_one_number_find_nothing(
    tiny_llama: Path, restarted: Callable[..., tuple[int, list[int]]], tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_llama, tmp_path / "served")
    restarted(model)
    shutil.rmtree(model)
    other_weights(tiny_llama, model)
    found, after = restarted(model)
    assert found == 0
    assert after == fresh(model)


def test_the_attention_that_the_model_runs_is_part_of_its_configuration(
    tiny_llama: Path, tier_settings: pytest.MonkeyPatch
) -> None:
    del tier_settings
    with TieredEngine.start(tiny_llama) as tiered:
        assert attention_of(tiered.local.engine) == ["engines.lmdeploy.cpu.attention.CpuPagedAttention"]


def test_two_engines_with_equal_everything_agree_and_others_do_not(
    tiny_llama: Path, tier_settings: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    del tier_settings
    from engines.lmdeploy.agent import LaunchInfo
    from engines.lmdeploy.file_digests import FileDigests
    from engines.lmdeploy.identity import identity_of

    def root(model: Path, **options: Any) -> bytes:
        with TieredEngine.start(model, **options) as tiered:
            launch = LaunchInfo(model="m", control_endpoint=None)
            return root_hash(identity_of(tiered.local.engine, model=launch.model, digests=FileDigests(tmp_path)))

    copy = shutil.copytree(tiny_llama, tmp_path / "copy")
    assert root(tiny_llama) == root(copy, num_gpu_blocks=48, max_batch_size=2, session_len=512)
    others = [root(tiny_llama, hf_overrides=ROPE), root(other_weights(tiny_llama, tmp_path / "other"))]
    assert len({root(tiny_llama), *others}) == 3
