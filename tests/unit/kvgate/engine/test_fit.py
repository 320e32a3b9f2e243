"""What of a preset fits a machine: each shortage is named with its way out."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvcontrol.presets import Preset, Presets
from kvgate.engine import fit
from kvgate.engine.finding import Finding, Verdict, is_fit
from kvgate.engine.fit import Machine, examine_preset, need_fitting_tiers, unmeasured_keys
from kvgate.engine.tier_flags import TierFlags, tier_options
from kvgate.engine.tiers import TierOptions
from kvgate.failure import CommandError
from kvgate.host.machine import Gpu
from kvgate.host.storage import FileSystem

GIB = 1 << 30
H100 = Gpu(selector="0", name="NVIDIA H100 80GB HBM3")
SERVER = Machine(gpus=(H100,), gpu_memory_bytes=81_559 << 20, available_bytes=120 * GIB, cores=16)
NO_GPU = Machine(gpus=(), gpu_memory_bytes=None, available_bytes=20 * GIB, cores=2)
SHARED = FileSystem(mounted_on=Path("/dev/shm"), kind="tmpfs", total_bytes=125 * GIB, free_bytes=125 * GIB)
DISK = FileSystem(mounted_on=Path("/data"), kind="ext4", total_bytes=2000 * GIB, free_bytes=1900 * GIB)


def preset(name: str, hardware: str = "nvidia-h100") -> Preset:
    return Presets.shipped().preset(name, hardware)


def tiers_of(wanted: Preset, **flags: object) -> TierOptions:
    return tier_options(TierFlags(**flags), wanted, "m", Path("/data/tiers"))  # type: ignore[arg-type]


@pytest.fixture
def disks(monkeypatch: pytest.MonkeyPatch) -> dict[str, FileSystem]:
    """Two file systems of a big server, by the beginning of a path; a test may put others there."""
    systems = {"/dev/shm": SHARED, "/data": DISK}

    def look(path: Path) -> FileSystem:
        return next(system for start, system in systems.items() if str(path).startswith(start))

    monkeypatch.setattr(fit, "file_system_of", look)
    return systems


def examined(wanted: Preset, tiers: TierOptions, machine: Machine = SERVER, instances: int = 1) -> dict[str, Finding]:
    return {finding.check: finding for finding in examine_preset(wanted, tiers, machine, instances)}


@pytest.mark.usefixtures("disks")
@pytest.mark.parametrize("name", list(Presets.shipped().workloads))
def test_every_preset_fits_the_machine_that_its_readings_are_from(name: str) -> None:
    findings = examined(preset(name), tiers_of(preset(name)))
    assert is_fit(list(findings.values())), findings
    assert findings["hardware"].found == "nvidia-h100 on NVIDIA H100 80GB HBM3"
    assert findings["gpu memory"].verdict is Verdict.OK


@pytest.mark.usefixtures("disks")
def test_sizes_are_for_each_engine() -> None:
    wanted = preset("long-context-64k")
    findings = examined(wanted, tiers_of(wanted), instances=2)
    assert findings["memory"].verdict is Verdict.FAIL
    assert findings["memory"].found.startswith("128 GiB for DDR, 120 GiB available")
    assert findings["memory"].advice == "--ddr 58GiB for each engine"
    assert examined(wanted, tiers_of(wanted, ddr="56GiB"), instances=2)["memory"].verdict is Verdict.OK


@pytest.mark.usefixtures("disks")
def test_memory_that_leaves_little_for_the_engine_is_a_warning() -> None:
    wanted = preset("low-latency")
    tight = replace(SERVER, available_bytes=33 * GIB)
    assert examined(wanted, tiers_of(wanted), tight)["memory"].verdict is Verdict.WARN


def test_a_file_of_an_earlier_run_counts_as_room(disks: dict[str, FileSystem], tmp_path: Path) -> None:
    held = tmp_path / "ddr"
    held.write_bytes(b"x" * (2 << 20))
    disks[str(tmp_path)] = replace(SHARED, free_bytes=31 * GIB)
    wanted = preset("low-latency")
    tiers = tiers_of(wanted, ddr=str((31 << 30) + (1 << 20)), ddr_path=str(held))
    exact = replace(SERVER, available_bytes=31 * GIB)
    findings = examined(wanted, tiers, exact)
    assert findings["shared memory"].verdict is Verdict.OK
    assert findings["memory"].verdict is Verdict.WARN
    held.unlink()
    findings = examined(wanted, tiers, exact)
    assert findings["shared memory"].verdict is Verdict.FAIL
    assert findings["memory"].verdict is Verdict.FAIL


def test_shared_memory_that_is_too_small_is_named_with_ways_out(disks: dict[str, FileSystem]) -> None:
    disks["/dev/shm"] = replace(SHARED, free_bytes=64 << 20)
    wanted = preset("low-latency")
    finding = examined(wanted, tiers_of(wanted))["shared memory"]
    assert finding.verdict is Verdict.FAIL
    assert finding.found == "32 GiB of 0.0625 GiB free on /dev/shm (tmpfs) for /dev/shm/kvgate-ddr-m"
    assert "--shm-size" in finding.advice
    assert examined(wanted, tiers_of(wanted, ddr_path="none"))["shared memory"].verdict is Verdict.OK


@pytest.mark.usefixtures("disks")
def test_shared_memory_on_a_disk_is_a_warning() -> None:
    wanted = preset("low-latency")
    finding = examined(wanted, tiers_of(wanted, ddr_path="/data/ddr"))["shared memory"]
    assert finding.verdict is Verdict.WARN
    assert "a disk, to which" in finding.found


def test_a_disk_that_is_too_small_is_named_with_ways_out(disks: dict[str, FileSystem]) -> None:
    disks["/data"] = replace(DISK, free_bytes=64 * GIB)
    wanted = preset("long-context-128k")
    finding = examined(wanted, tiers_of(wanted))["disk"]
    assert finding.verdict is Verdict.FAIL
    assert finding.advice == "--nvme 57GiB for each engine, or another disk with --nvme-dir"
    assert examined(wanted, tiers_of(wanted, nvme="57GiB"))["disk"].verdict is Verdict.OK
    assert examined(wanted, tiers_of(wanted, nvme="none"))["disk"].found == "no NVMe tier"


def test_a_disk_without_direct_io_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = preset("long-context-128k")
    monkeypatch.setattr(fit, "nearest_existing", lambda _: Path("/proc"))
    finding = fit.check_direct_io([tiers_of(wanted)])
    assert finding.verdict is Verdict.WARN
    assert finding.found.startswith("O_DIRECT does not work in /proc: ")


@pytest.mark.usefixtures("disks")
def test_a_smaller_card_is_a_warning_and_no_card_a_failure() -> None:
    wanted = preset("throughput")
    small = examined(wanted, tiers_of(wanted), replace(SERVER, gpu_memory_bytes=40 * GIB))["gpu memory"]
    assert small.verdict is Verdict.WARN
    assert "--max-batch-size (now 128)" in small.advice
    assert examined(wanted, tiers_of(wanted), NO_GPU)["hardware"].verdict is Verdict.FAIL
    assert (
        examined(wanted, tiers_of(wanted), replace(SERVER, gpu_memory_bytes=None))["gpu memory"].verdict is Verdict.WARN
    )


@pytest.mark.usefixtures("disks")
def test_readings_of_another_card_are_a_warning() -> None:
    other = replace(SERVER, gpus=(Gpu(selector="0", name="NVIDIA A100-SXM4-80GB"),))
    finding = examined(preset("throughput"), tiers_of(preset("throughput")), other)["hardware"]
    assert finding.verdict is Verdict.WARN
    assert "measurements are from another GPU" in finding.found


@pytest.mark.usefixtures("disks")
def test_few_cores_are_a_warning() -> None:
    wanted = preset("low-latency")
    assert examined(wanted, tiers_of(wanted), instances=2)["cores"].verdict is Verdict.OK
    assert examined(wanted, tiers_of(wanted), replace(SERVER, cores=6), instances=2)["cores"].verdict is Verdict.WARN


@pytest.mark.usefixtures("disks")
@pytest.mark.parametrize("hardware", ["ascend-910b", "cambricon-mlu590", "kunlunxin-p800"])
def test_hardware_that_kvgate_cannot_start_on_is_a_failure(hardware: str) -> None:
    wanted = preset("low-latency", hardware)
    findings = examined(wanted, tiers_of(wanted))
    assert findings["hardware"].verdict is Verdict.FAIL
    assert "kvgate does not run there yet" in findings["hardware"].found
    assert findings["not measured"].verdict is Verdict.WARN
    assert findings["not measured"].found.startswith("all of it")


@pytest.mark.usefixtures("disks")
def test_hardware_that_might_run_is_a_warning() -> None:
    wanted = preset("low-latency", "hygon-dcu-k100")
    finding = examined(wanted, tiers_of(wanted))["hardware"]
    assert finding.verdict is Verdict.WARN
    assert "kvgate was never run on this hardware" in finding.found


@pytest.mark.usefixtures("disks")
def test_what_nobody_measured_and_what_was_lowered_is_told() -> None:
    wanted = preset("low-latency")
    assert "quota.burst_share" in examined(wanted, tiers_of(wanted))["not measured"].found
    assert "max_batch_size" not in unmeasured_keys(wanted)
    on_cpu = examine_preset(preset("throughput", "cpu"), TierOptions(), NO_GPU, 1)
    assert sum(finding.check == "lowered" for finding in on_cpu) == 4


def test_engines_do_not_start_with_tiers_that_do_not_fit(disks: dict[str, FileSystem]) -> None:
    disks["/dev/shm"] = replace(SHARED, free_bytes=GIB)
    with pytest.raises(CommandError, match="the tiers do not fit this machine: memory: 1048576 GiB for DDR"):
        need_fitting_tiers([TierOptions(ddr_bytes=1 << 50)])
    with pytest.raises(CommandError, match=r"the tiers do not fit this machine: shared memory: 2 GiB of 1 GiB free"):
        need_fitting_tiers([TierOptions(ddr_bytes=GIB, ddr_path=Path(f"/dev/shm/kv-{n}")) for n in range(2)])


def test_folders_of_tiers_are_made_private(tmp_path: Path) -> None:
    tiers = TierOptions(
        ddr_bytes=1 << 20, ddr_path=tmp_path / "ddr" / "kv", nvme_dir=tmp_path / "nvme" / "engine-0", nvme_bytes=1 << 20
    )
    need_fitting_tiers([tiers])
    assert (tmp_path / "ddr").is_dir()
    assert (tmp_path / "nvme" / "engine-0").stat().st_mode & 0o777 == 0o700
    need_fitting_tiers([tiers])


def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CommandError, match=r"cannot create the folder .*/file/kv: Not a directory"):
        need_fitting_tiers([TierOptions(ddr_bytes=1 << 20, nvme_dir=tmp_path / "file" / "kv", nvme_bytes=1 << 20)])


def test_engines_without_tiers_need_nothing() -> None:
    need_fitting_tiers([TierOptions()])
