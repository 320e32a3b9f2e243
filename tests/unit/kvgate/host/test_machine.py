from pathlib import Path

import pytest

from kvgate.failure import CommandError
from kvgate.host import machine
from kvgate.host.machine import Device, choose_gpus, gpus

LISTED = (
    "GPU 0: NVIDIA H100 (UUID: GPU-aa)\nGPU 1: NVIDIA H100 (UUID: GPU-bb)\n  MIG 1g.10gb Device 0: (UUID: MIG-cc)\n"
)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory first on PATH with an nvidia-smi that lists two GPUs."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{LISTED}END\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tool


@pytest.mark.usefixtures("driver")
def test_the_gpus_that_the_driver_lists_are_found() -> None:
    assert [(gpu.selector, gpu.name) for gpu in gpus()] == [("0", "NVIDIA H100"), ("1", "NVIDIA H100")]


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("visible", "selectors"),
    [("1", ["1"]), ("1,0", ["1", "0"]), ("", []), ("-1", []), ("GPU-bb", ["GPU-bb"]), ("0,7,1", ["0"])],
)
def test_only_visible_gpus_count(visible: str, selectors: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.selector for gpu in gpus()] == selectors


def test_without_a_driver_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpus() == []
    assert choose_gpus(Device.AUTO) == []


def test_a_driver_that_fails_lists_none(driver: Path) -> None:
    driver.write_text("#!/bin/sh\necho 'GPU 0: X (UUID: Y)'\nexit 9\n")
    assert gpus() == []


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CommandError, match="no GPU is visible"):
        choose_gpus(Device.CUDA)


@pytest.mark.usefixtures("driver")
def test_gpus_that_torch_cannot_use_are_told_rather_than_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "torch_version", lambda: "2.13.0+cpu")
    with pytest.raises(CommandError, match=r"2 GPU\(s\), but torch is 2\.13\.0\+cpu"):
        choose_gpus(Device.AUTO)
    assert choose_gpus(Device.CPU) == []
    monkeypatch.setattr(machine, "torch_version", lambda: "2.12.1+cu130")
    assert len(choose_gpus(Device.AUTO)) == 2
