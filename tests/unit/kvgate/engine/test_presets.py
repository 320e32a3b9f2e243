"""What a preset makes of an engine's options."""

import json
from pathlib import Path

import pytest

from kvgate.engine.instance import EngineLimits
from kvgate.engine.model import Model
from kvgate.engine.presets import (
    choose_preset,
    model_context_tokens,
    preset_line,
    preset_of_options,
    with_preset,
)
from kvgate.failure import CommandError
from kvgate.host.machine import Gpu

H100 = Gpu(selector="0", name="NVIDIA H100 80GB HBM3")
A100 = Gpu(selector="0", name="NVIDIA A100-SXM4-80GB")


def test_the_hardware_is_what_this_machine_has() -> None:
    assert choose_preset("throughput", None, [H100]).hardware == "nvidia-h100"
    assert choose_preset("throughput", None, []).hardware == "cpu"


def test_hardware_that_is_named_wins() -> None:
    assert choose_preset("throughput", "ascend-910b", [H100]).hardware == "ascend-910b"


def test_a_card_that_no_preset_is_made_for_is_not_guessed_at() -> None:
    with pytest.raises(CommandError, match="no preset for NVIDIA A100-SXM4-80GB") as caught:
        choose_preset("throughput", None, [A100])
    assert "--hardware: nvidia-h100, ascend-910b" in caught.value.advice


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(CommandError, match="unknown preset 'fast'; known: long-context-32k"):
        choose_preset("fast", None, [])
    with pytest.raises(CommandError, match="unknown hardware 'tpu'; known: nvidia-h100"):
        choose_preset("throughput", "tpu", [])


def model(folder: Path, config: object, *, is_tiny: bool = False) -> Model:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return Model(folder=folder, name="m", is_tiny=is_tiny)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"text_config": {"max_position_embeddings": 2048}}, 2048),
        ({"model_type": "llama"}, None),
        ({"max_position_embeddings": None}, None),
        ([], None),
    ],
)
def test_a_models_context_is_what_its_config_says(tmp_path: Path, config: object, expected: int | None) -> None:
    assert model_context_tokens(model(tmp_path, config).folder) == expected


def test_a_folder_without_a_config_says_nothing_of_its_context(tmp_path: Path) -> None:
    assert model_context_tokens(tmp_path) is None


def test_a_preset_fills_in_what_nobody_set(tmp_path: Path) -> None:
    preset = choose_preset("long-context-64k", None, [H100])
    long = model(tmp_path, {"max_position_embeddings": 131_072})
    limits = with_preset(EngineLimits(max_batch_size=3), preset, long, 1)
    assert (limits.max_batch_size, limits.block_tokens, limits.context_tokens) == (3, 64, 65_536)
    assert (limits.kv_share, limits.max_prefill_tokens, limits.piecewise_cudagraph_tokens) == (0.8, 8192, 2048)


def test_a_context_is_never_longer_than_the_models(tmp_path: Path) -> None:
    preset = choose_preset("long-context-64k", None, [H100])
    assert (
        with_preset(EngineLimits(), preset, model(tmp_path, {"max_position_embeddings": 8192}), 1).context_tokens
        == 8192
    )


def test_engines_on_one_gpu_share_what_the_preset_gives_to_one(tmp_path: Path) -> None:
    preset = choose_preset("throughput", None, [H100])
    served = model(tmp_path, {})
    assert with_preset(EngineLimits(), preset, served, 2).kv_share == 0.4
    assert with_preset(EngineLimits(kv_share=0.3), preset, served, 2).kv_share == 0.3
    assert with_preset(EngineLimits(kv_blocks=99), preset, served, 2).kv_share is None
    assert with_preset(EngineLimits(), preset, model(tmp_path, {}, is_tiny=True), 2).kv_share is None


def test_on_a_cpu_a_preset_takes_no_share_of_a_gpu(tmp_path: Path) -> None:
    limits = with_preset(EngineLimits(), choose_preset("throughput", None, []), model(tmp_path, {}), 1)
    assert (limits.kv_share, limits.block_tokens, limits.piecewise_cudagraph_tokens) == (None, 16, None)


def test_an_engine_is_started_on_the_hardware_of_its_preset_only() -> None:
    assert preset_of_options(None, None, []) is None
    assert preset_of_options("throughput", "cpu", []) == choose_preset("throughput", None, [])
    with pytest.raises(CommandError, match="the preset is for nvidia-h100, and engines would run on the CPU"):
        preset_of_options("throughput", "nvidia-h100", [])
    with pytest.raises(CommandError, match="the preset is for ascend-910b, and engines would run on NVIDIA H100"):
        preset_of_options("throughput", "ascend-910b", [H100])
    with pytest.raises(CommandError, match="--hardware needs --preset"):
        preset_of_options(None, "cpu", [])


def test_a_line_says_what_was_lowered_and_what_is_not_applied() -> None:
    line = preset_line(choose_preset("throughput", None, []), ["its quotas are not applied: so it is"])
    assert line.startswith("Preset throughput on cpu; ddr.size is 2GiB, the most for cpu")
    assert line.endswith("; its quotas are not applied: so it is")
