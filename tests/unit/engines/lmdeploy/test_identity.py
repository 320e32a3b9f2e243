"""The digest of a weights folder: the same everywhere, another one for other weights, an error for no weights."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engines.lmdeploy.identity import WeightsError, weights_revision


def write_weights(path: Path, tensors: dict[str, bytes]) -> None:
    """A safetensors file by hand: length, header, data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 64}')
    write_weights(folder / "model.safetensors", {"a": bytes(1_000), "b": b"\1" * 1_000})
    return folder


def test_the_digest_is_the_same_in_another_place_and_another_process(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "elsewhere")
    (copy / "README.md").write_text("not weights")
    code = "import sys; from pathlib import Path; from engines.lmdeploy.identity import weights_revision as w; "
    done = subprocess.run(
        [sys.executable, "-c", code + "print(w(Path(sys.argv[1])))", str(copy)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.strip() == weights_revision(model)


def test_other_values_another_shape_another_configuration_are_other_digests(model: Path) -> None:
    digests = {weights_revision(model)}
    write_weights(model / "model.safetensors", {"a": bytes(1_000), "b": b"\2" * 1_000})
    digests.add(weights_revision(model))
    write_weights(model / "model.safetensors", {"a": bytes(500), "b": b"\2" * 1_500})
    digests.add(weights_revision(model))
    (model / "config.json").write_text('{"hidden_size": 65}')
    digests.add(weights_revision(model))
    write_weights(model / "more.safetensors", {"c": b"3"})
    digests.add(weights_revision(model))
    assert len(digests) == 5


def test_bin_files_are_sampled_where_there_are_no_safetensors(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"\1" * 100_000)
    first = weights_revision(model)
    (model / "pytorch_model.bin").write_bytes(b"\2" * 100_000)
    assert weights_revision(model) != first


def test_a_folder_without_weights_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=f"{tmp_path} holds neither"):
        weights_revision(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 64, (8).to_bytes(8, "little") + b"not json", b"\2" + bytes(7) + b"[]"]
)
def test_a_broken_safetensors_file_is_an_error_that_names_it(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        weights_revision(model)
