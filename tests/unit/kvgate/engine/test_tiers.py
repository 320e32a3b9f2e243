"""The tiers of an engine: what options and presets say, and what the engine is told."""

from pathlib import Path

import pytest

from engines.lmdeploy.settings import EngineSettings
from kvcontrol.core.watermarks import Watermarks
from kvcontrol.core.write_mode import WriteMode
from kvcontrol.presets import Presets
from kvgate.engine.tier_flags import TierFlags, tier_options
from kvgate.engine.tiers import TierOptions
from kvgate.failure import CommandError

DIR = Path("/cache/tiers")
LONG = Presets.shipped().preset("long-context-128k", "nvidia-h100")
SHORT = Presets.shipped().preset("low-latency", "nvidia-h100")


def test_without_options_and_preset_there_are_no_tiers() -> None:
    options = tier_options(TierFlags(), None, "a model/7B", DIR)
    assert options == TierOptions()
    assert options.environment() == {}


def test_ddr_alone_is_memory_of_the_engines_process() -> None:
    options = tier_options(TierFlags(ddr="4GiB"), None, "a model/7B", DIR)
    assert options.environment() == {"KVGATE_ENGINE_DDR_BYTES": str(4 << 30)}


def test_all_options() -> None:
    flags = TierFlags(
        ddr="4GiB", ddr_path="/dev/shm/kv", nvme_dir=Path("/data/kv"), nvme="64GiB", tier_write=WriteMode.THROUGH
    )
    assert tier_options(flags, None, "a model/7B", DIR).environment() == {
        "KVGATE_ENGINE_DDR_BYTES": str(4 << 30),
        "KVGATE_ENGINE_DDR_PATH": "/dev/shm/kv",
        "KVGATE_ENGINE_NVME_PATH": "/data/kv",
        "KVGATE_ENGINE_NVME_BYTES": str(64 << 30),
        "KVGATE_ENGINE_WRITE_MODE": "write_through",
    }


def test_a_presets_tiers() -> None:
    assert tier_options(TierFlags(), LONG, "a model/7B", DIR).environment() == {
        "KVGATE_ENGINE_DDR_BYTES": str(96 << 30),
        "KVGATE_ENGINE_DDR_PATH": "/dev/shm/kvgate-ddr-a_model_7B",
        "KVGATE_ENGINE_NVME_PATH": "/cache/tiers/a_model_7B",
        "KVGATE_ENGINE_NVME_BYTES": str(512 << 30),
        "KVGATE_ENGINE_WRITE_MODE": "write_through",
        "KVGATE_ENGINE_DDR_HIGH_WATERMARK": "0.95",
        "KVGATE_ENGINE_DDR_LOW_WATERMARK": "0.9",
        "KVGATE_ENGINE_NVME_HIGH_WATERMARK": "0.9",
        "KVGATE_ENGINE_NVME_LOW_WATERMARK": "0.85",
        "KVGATE_ENGINE_DDR_POLICY": "adaptive",
        "KVGATE_ENGINE_NVME_POLICY": "adaptive",
        "KVGATE_ENGINE_LOAD_DEADLINE_S": "7.9",
    }
    assert "KVGATE_ENGINE_NVME_PATH" not in tier_options(TierFlags(), SHORT, "a model/7B", DIR).environment()


@pytest.mark.parametrize("name", list(Presets.shipped().workloads))
@pytest.mark.parametrize("hardware", ["nvidia-h100", "cpu"])
def test_every_preset_is_what_an_engines_settings_take(
    monkeypatch: pytest.MonkeyPatch, name: str, hardware: str
) -> None:
    preset = Presets.shipped().preset(name, hardware)
    for variable, value in tier_options(TierFlags(), preset, "m", DIR).environment().items():
        monkeypatch.setenv(variable, value)
    settings = EngineSettings.load()
    assert settings.ddr_bytes == preset.ddr.size_bytes
    assert settings.nvme_bytes == (preset.nvme.size_bytes if preset.nvme else 0)
    assert settings.load_deadline_s == preset.load_deadline_s
    assert settings.ddr_watermarks == Watermarks(high=preset.ddr.high_watermark, low=preset.ddr.low_watermark)
    if preset.nvme is not None:
        assert settings.write_mode is preset.nvme.write_mode
        assert settings.nvme_watermarks == Watermarks(high=preset.nvme.high_watermark, low=preset.nvme.low_watermark)


def test_an_options_word_goes_before_the_presets() -> None:
    flags = TierFlags(ddr="1GiB", ddr_path="none", nvme="2GiB", tier_write=WriteMode.BACK)
    options = tier_options(flags, LONG, "a model/7B", DIR)
    assert (options.ddr_bytes, options.ddr_path, options.nvme_bytes) == (1 << 30, None, 2 << 30)
    assert (options.write_mode, options.load_deadline_s) == (WriteMode.BACK, 7.9)


def test_none_switches_off_what_a_preset_asks_for() -> None:
    assert tier_options(TierFlags(ddr="none"), LONG, "a model/7B", DIR) == TierOptions()
    options = tier_options(TierFlags(nvme="None"), LONG, "a model/7B", DIR)
    assert (options.nvme_dir, options.nvme_bytes, options.write_mode) == (None, 0, None)


def test_a_folder_for_nvme_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    flags = TierFlags(ddr="1GiB", nvme="1GiB", nvme_dir=Path("kv"))
    assert tier_options(flags, None, "a model/7B", DIR).nvme_dir == tmp_path / "kv"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (TierFlags(nvme="1GiB"), "--nvme: no DDR tier is configured"),
        (
            TierFlags(ddr_path="/dev/shm/x", tier_write=WriteMode.BACK),
            "--ddr-path, --tier-write: no DDR tier is configured",
        ),
        (TierFlags(ddr="none", nvme_dir=Path("/data")), "--nvme-dir: no DDR tier is configured"),
        (TierFlags(ddr="1GiB", nvme_dir=Path("/data")), "--nvme-dir: no NVMe tier is configured"),
        (TierFlags(ddr="1GiB", tier_write=WriteMode.BACK), "--tier-write: no NVMe tier is configured"),
        (TierFlags(ddr="1GiB", ddr_path="shm"), "--ddr-path is 'shm'; expected the absolute path of a file"),
        (
            TierFlags(ddr="1GiB", ddr_path="/dev/shm/"),
            "--ddr-path is '/dev/shm/'; expected the absolute path of a file",
        ),
        (TierFlags(ddr="a lot"), "--ddr is 'a lot'; expected an amount of memory, for example 512MiB or 2GiB"),
        (TierFlags(ddr="1GiB", nvme="-1"), "--nvme is '-1'; expected an amount of memory"),
    ],
)
def test_half_of_a_tier_is_refused(flags: TierFlags, message: str) -> None:
    with pytest.raises(CommandError, match=message):
        tier_options(flags, None, "a model/7B", DIR)


def test_each_of_several_engines_has_files_of_its_own() -> None:
    options = tier_options(TierFlags(), LONG, "a model/7B", DIR)
    first, second = options.of_instance(0), options.of_instance(1)
    assert (first.ddr_path, second.ddr_path) == (
        Path("/dev/shm/kvgate-ddr-a_model_7B-0"),
        Path("/dev/shm/kvgate-ddr-a_model_7B-1"),
    )
    assert (first.nvme_dir, second.nvme_dir) == (DIR / "a_model_7B" / "engine-0", DIR / "a_model_7B" / "engine-1")
    assert TierOptions(ddr_bytes=1).of_instance(3) == TierOptions(ddr_bytes=1)


def test_options_say_what_they_are() -> None:
    assert str(TierOptions()) == "none"
    assert str(TierOptions(ddr_bytes=4 << 30)) == "DDR 4 GiB in memory of its process"
    assert str(TierOptions(ddr_bytes=64 << 20)) == "DDR 64 MiB in memory of its process"
    assert str(tier_options(TierFlags(), LONG, "m", DIR)) == (
        "DDR 96 GiB in /dev/shm/kvgate-ddr-m, NVMe 512 GiB in /cache/tiers/m, write_through"
    )
