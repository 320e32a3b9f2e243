"""The digest of a weights folder: the same everywhere, another one for other weights, an error for no weights."""

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.lmdeploy.file_digests import FileDigests
from engines.lmdeploy.weights import WeightsError
from engines.lmdeploy.weights import weights_revision as revision_of

weights_revision = partial(revision_of, digests=FileDigests(Path("/nowhere")))


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
    code = (
        "import sys; from pathlib import Path; from engines.lmdeploy.weights import weights_revision; "
        "from engines.lmdeploy.file_digests import FileDigests; "
        "print(weights_revision(Path(sys.argv[1]), FileDigests(Path(sys.argv[1]))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(copy)],
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


@given(at=st.integers(0, 1_999), flip=st.integers(1, 255))
def test_every_byte_of_every_tensor_counts(at: int, flip: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("model")
    data = bytearray(2_000)
    write_weights(folder / "model.safetensors", {"a": bytes(data[:1_000]), "b": bytes(data[1_000:])})
    before = weights_revision(folder)
    data[at] ^= flip
    write_weights(folder / "model.safetensors", {"a": bytes(data[:1_000]), "b": bytes(data[1_000:])})
    assert weights_revision(folder) != before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin", "adapter_config.json"])
def test_pickles_and_adapters_count_beside_safetensors(model: Path, name: str) -> None:
    digests = {weights_revision(model)}
    for content in (b"\1" * 100_000, b"\2" * 100_000):
        (model / name).write_bytes(content)
        digests.add(weights_revision(model))
    assert len(digests) == 3


def test_a_folder_without_weights_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=f"{tmp_path} holds neither"):
        weights_revision(tmp_path)


def test_a_file_that_can_not_be_read_is_an_error_that_names_it(model: Path) -> None:
    (model / "other.bin").symlink_to(model / "gone")
    with pytest.raises(WeightsError, match="gone"):
        weights_revision(model)
