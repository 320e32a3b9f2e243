"""What an engine computes with besides its weights: whatever changes it changes the text, and nothing else does."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmdeploy.messages import PytorchEngineConfig, QuantPolicy
from lmdeploy.pytorch.config import ModelConfig

from engines.lmdeploy.effective_config import effective_config
from engines.lmdeploy.file_digests import FileDigests
from engines.lmdeploy.identity import identity_of
from engines.models.tiny import build_tiny
from kvcontrol.core import CacheIdentity, IdentityError, root_hash


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")


def engine(model: Path, **options: Any) -> Any:
    """What is read of an engine, with LMDeploy's own configurations in it."""
    config = PytorchEngineConfig(
        device_type=options.pop("device_type", "cuda"), hf_overrides=options.get("hf_overrides")
    )
    config.custom_module_map = options.pop("modules", None)
    model_config = ModelConfig.from_pretrained(
        str(model), **{"dtype": "float16", "device_type": config.device_type} | options
    )
    return SimpleNamespace(engine_config=config, model_config=model_config, executor=SimpleNamespace())


def test_the_same_model_elsewhere_has_the_same_text(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "elsewhere")
    assert effective_config(engine(copy)) == effective_config(engine(model))
    assert str(model) not in effective_config(engine(model))


@pytest.mark.parametrize(
    "options",
    [
        {"hf_overrides": {"rope_parameters": {"rope_theta": 50.0, "rope_type": "default"}}},
        {"hf_overrides": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}}},
        {"hf_overrides": {"rms_norm_eps": 0.1}},
        {"hf_overrides": {"sliding_window": 64}},
        {"hf_overrides": {"attention_bias": True}},
        {"hf_overrides": {"a_setting_that_nobody_knows_yet": 1}},
        {"hf_overrides": {"nested": {"deep": [1, {"deeper": None}]}}},
        {"dtype": "bfloat16"},
        {"model_format": "fp8"},
        {"device_type": "ascend"},
    ],
    ids=str,
)
def test_every_option_that_changes_what_is_computed_changes_the_text(model: Path, options: dict[str, Any]) -> None:
    assert effective_config(engine(model, **options)) != effective_config(engine(model))


@pytest.mark.parametrize(
    "change",
    [
        lambda config: setattr(config, "sliding_window", 64),
        lambda config: setattr(config, "use_flash_mla", True),
        lambda config: setattr(config, "mla_kv_cache_dtype", "fp8_ds_mla"),
        lambda config: setattr(config, "states_shapes", [((1, 2), torch.float32)]),
        lambda config: setattr(config, "model_paradigm", "dllm"),
    ],
)
def test_every_field_of_lmdeploys_own_configuration_counts(model: Path, change: Callable[[Any], None]) -> None:
    changed = engine(model)
    change(changed.model_config)
    assert effective_config(changed) != effective_config(engine(model))


def test_a_file_of_other_modules_counts_by_its_contents(model: Path, tmp_path: Path) -> None:
    one, same, other = (tmp_path / name for name in ("one.py", "same.py", "other.py"))
    one.write_text("MODULE_MAP = {}")
    same.write_text("MODULE_MAP = {}")
    other.write_text("MODULE_MAP = {'a': 'b'}")
    texts = [effective_config(engine(model, modules=str(path))) for path in (one, same, other)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0] != effective_config(engine(model))


def test_the_version_of_lmdeploy_counts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = effective_config(engine(model))
    monkeypatch.setattr("lmdeploy.__version__", "0.19.0")
    assert effective_config(engine(model)) != before


def test_how_the_engine_is_spread_over_devices_does_not_count(model: Path) -> None:
    text = json.loads(effective_config(engine(model)))
    assert "dist_config" not in text["model"]


def test_a_value_without_a_text_of_its_own_is_refused_by_kind(model: Path) -> None:
    strange = engine(model)
    strange.model_config.states_shapes = [torch.zeros(1)]
    with pytest.raises(IdentityError, match=r"has a torch\.Tensor, which has no text that other engines share"):
        effective_config(strange)


def identity(model: Path, tmp_path: Path, adapters: dict[str, Path]) -> CacheIdentity:
    """The identity of an engine with adapters."""
    served = engine(model)
    served.model_path = str(model)
    served.engine_config.adapters = {name: str(folder) for name, folder in adapters.items()}
    served.cache_config = SimpleNamespace(block_size=16, quant_policy=QuantPolicy.NONE)
    served.dist_config = SimpleNamespace(attn_tp=1)
    return identity_of(served, model="m", digests=FileDigests(tmp_path / "digests"))


def test_an_adapters_contents_count_for_its_own_blocks_alone(model: Path, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "same", "other")]
    for folder, weights in zip(folders, (b"\1", b"\1", b"\2"), strict=True):
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.bin").write_bytes(weights * 1000)
    one, same, other = (identity(model, tmp_path, {"sql": folder, "chat": folders[0]}) for folder in folders)
    assert one == same
    assert [name for name, _ in one.adapters] == ["chat", "sql"]
    assert root_hash(one, adapter="sql") != root_hash(other, adapter="sql")
    for adapter in ("", "chat"):
        assert root_hash(one, adapter=adapter) == root_hash(other, adapter=adapter)
    assert root_hash(one) == root_hash(identity(model, tmp_path, {}))
