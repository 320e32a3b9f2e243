from pathlib import Path

import pytest

from kvgate.engine.model import model_from_folder, tiny_model
from kvgate.failure import CommandError


def folder(place: Path, *names: str) -> Path:
    made = place / "my-model"
    made.mkdir()
    for name in names:
        (made / name).write_text('{"model_type": "llama"}')
    return made


def test_a_model_folder_is_served_under_its_name(tmp_path: Path) -> None:
    made = folder(tmp_path, "config.json", "model.safetensors", "tokenizer.json")
    assert model_from_folder(made, None).name == "my-model"
    assert model_from_folder(made, "other").name == "other"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="no such folder"):
        model_from_folder(tmp_path / "absent", None)


@pytest.mark.parametrize(
    ("names", "lacks"),
    [
        ((), r"config\.json with a model_type, weights \(.*\), a tokenizer"),
        (("config.json", "tokenizer.json"), r"lacks weights"),
        (("config.json", "model.safetensors"), r"lacks a tokenizer"),
    ],
)
def test_what_a_folder_lacks_is_named(tmp_path: Path, names: tuple[str, ...], lacks: str) -> None:
    with pytest.raises(CommandError, match=f"is not a Hugging Face model folder; it lacks|{lacks}") as failure:
        model_from_folder(folder(tmp_path, *names), None)
    import re

    assert re.search(lacks, failure.value.message)


def test_a_config_that_is_not_a_models(tmp_path: Path) -> None:
    made = folder(tmp_path, "model.safetensors", "tokenizer.json")
    (made / "config.json").write_text("[1]")
    with pytest.raises(CommandError, match=r"config\.json with a model_type"):
        model_from_folder(made, None)


def test_a_damaged_tiny_model_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGATE_CACHE_DIR", str(tmp_path))
    model = tiny_model()
    weights = (model.folder / "model.safetensors").read_bytes()
    (model.folder / "tokenizer.json").unlink()
    (model.folder / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    assert tiny_model() == model
    assert (model.folder / "tokenizer.json").is_file()
    assert (model.folder / "model.safetensors").read_bytes() == weights
