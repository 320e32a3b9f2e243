"""What of a preset fits this machine, and how to change what doesn't. Looks only; nothing is reserved."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvgate.engine.finding import Finding, Verdict
from kvgate.engine.presets import LAUNCHABLE
from kvgate.engine.tiers import TierOptions
from kvgate.failure import CommandError
from kvgate.host.machine import Gpu, available_memory_bytes, core_count, gpu_memory_bytes
from kvgate.host.storage import direct_io_problem, file_system_of, held_bytes, nearest_existing

if TYPE_CHECKING:
    from kvcontrol.presets import Preset

NOT_MEASURED = "not measured"
SPARE_MEMORY_BYTES = 4 << 30
"""Main memory that an engine and the gateway take beside the tiers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What this machine has."""

    gpus: tuple[Gpu, ...]
    gpu_memory_bytes: int | None
    """Of the first GPU; None where there is none or the driver doesn't tell."""
    available_bytes: int
    cores: int

    @classmethod
    def here(cls, gpus: Sequence[Gpu]) -> "Machine":
        """Look at this machine."""
        return cls(
            gpus=tuple(gpus),
            gpu_memory_bytes=gpu_memory_bytes(gpus[0]) if gpus else None,
            available_bytes=available_memory_bytes(),
            cores=core_count(),
        )


def examine_preset(preset: "Preset", tiers: TierOptions, machine: Machine, instances: int) -> list[Finding]:
    """Check a preset whose tiers are as told for so many engine instances."""
    own = [tiers.of_instance(index) for index in range(instances)] if instances > 1 else [tiers]
    findings = [
        check_hardware(preset, machine),
        check_gpu_memory(preset, machine),
        check_cores(preset, machine, instances),
        check_memory(own, machine.available_bytes),
        check_shared_memory(own),
        check_disk(own),
        check_direct_io(own),
    ]
    lowered = [Finding(check="lowered", verdict=Verdict.OK, found=note) for note in preset.notes]
    return [*findings, *lowered, tell_unmeasured(preset)]


def need_fitting_tiers(own: Sequence[TierOptions]) -> None:
    """Raise ``CommandError`` when the tiers of engines that are about to start don't fit, and make their folders."""
    if not own[0].ddr_bytes:
        return
    for finding in (check_memory(own, available_memory_bytes()), check_shared_memory(own), check_disk(own)):
        if finding.verdict is Verdict.FAIL:
            raise CommandError(f"the tiers do not fit this machine: {finding.check}: {finding.found}", finding.advice)
    for each in own:
        for option, folder in (("--ddr-path", each.ddr_path and each.ddr_path.parent), ("--nvme-dir", each.nvme_dir)):
            try:
                if folder is not None:
                    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                raise CommandError(f"cannot create the folder {folder}: {error.strerror}", f"see {option}") from error


def check_hardware(preset: "Preset", machine: Machine) -> Finding:
    """Kvgate runs on it, and it is what this machine has."""
    device = preset.engine.device
    if device not in LAUNCHABLE:
        what = "LMDeploy has no back end for this hardware" if device == "none" else f"LMDeploy's device {device}"
        return Finding(
            check="hardware",
            verdict=Verdict.FAIL,
            found=f"{preset.hardware}: kvgate does not run there yet ({what}); the preset was never tried",
            advice="choose other hardware with --hardware: kvgate starts engines on CUDA devices and CPUs",
        )
    if device == "cuda" and not machine.gpus:
        return Finding(
            check="hardware",
            verdict=Verdict.FAIL,
            found=f"{preset.hardware} is a GPU, and none is visible here",
            advice="check nvidia-smi and CUDA_VISIBLE_DEVICES, or use --hardware cpu",
        )
    seen = machine.gpus[0].name if device == "cuda" else f"CPU, {machine.cores} cores"
    from kvcontrol.presets import Evidence, Presets

    if preset.evidence is Evidence.NONE:
        return Finding(
            check="hardware",
            verdict=Verdict.WARN,
            found=f"{preset.hardware} on {seen}: kvgate was never run on this hardware",
            advice="benchmark before you rely on the values",
        )
    if device == "cuda" and Presets.shipped().recognise(seen) != preset.hardware:
        return Finding(
            check="hardware",
            verdict=Verdict.WARN,
            found=f"{preset.hardware} on {seen}: the measurements are from another GPU",
            advice="benchmark before you rely on the values",
        )
    return Finding(check="hardware", verdict=Verdict.OK, found=f"{preset.hardware} on {seen}")


def check_gpu_memory(preset: "Preset", machine: Machine) -> Finding:
    """The GPU has the memory that the preset's batch is made for."""
    if preset.engine.device != "cuda":
        return Finding(check="gpu memory", verdict=Verdict.OK, found="no GPU memory is needed")
    have = machine.gpu_memory_bytes
    if have is None:
        return Finding(check="gpu memory", verdict=Verdict.WARN, found="nvidia-smi reports none")
    if preset.memory_bytes is not None and have < preset.memory_bytes:
        return Finding(
            check="gpu memory",
            verdict=Verdict.WARN,
            found=f"{_gib(have)}, the preset expects {_gib(preset.memory_bytes)}: engines run and preempt requests",
            advice=f"lower --max-batch-size (now {preset.max_batch_size}), or serve a smaller model",
        )
    return Finding(check="gpu memory", verdict=Verdict.OK, found=_gib(have))


def check_cores(preset: "Preset", machine: Machine, instances: int) -> Finding:
    """There are cores for the engines' loops and transfer threads."""
    wanted = preset.host_cores * instances
    if machine.cores < wanted:
        return Finding(
            check="cores",
            verdict=Verdict.WARN,
            found=f"{machine.cores}, {wanted} are recommended ({preset.host_cores} for each engine)",
            advice="run fewer engines on this machine",
        )
    return Finding(check="cores", verdict=Verdict.OK, found=f"{machine.cores}, {wanted} are recommended")


def check_memory(own: Sequence[TierOptions], available_bytes: int) -> Finding:
    """Main memory for the DDR tiers; what a file of an earlier run holds already counts as there."""
    wanted = sum(each.ddr_bytes for each in own)
    if not wanted:
        return Finding(check="memory", verdict=Verdict.OK, found="no DDR tier")
    held = sum(_memory_held(each.ddr_path) for each in own if each.ddr_path is not None)
    have = available_bytes + held
    text = f"{_gib(wanted)} for DDR, {_gib(have)} available"
    if wanted + SPARE_MEMORY_BYTES > have:
        most = max(0, have - SPARE_MEMORY_BYTES) // len(own) >> 30
        return Finding(
            check="memory",
            verdict=Verdict.FAIL if wanted > have else Verdict.WARN,
            found=f"{text}; engines need about {_gib(SPARE_MEMORY_BYTES)} more",
            advice=f"--ddr {most}GiB for each engine"
            if most
            else "use --ddr none, a machine with more memory, or fewer engines",
        )
    return Finding(check="memory", verdict=Verdict.OK, found=text)


def check_shared_memory(own: Sequence[TierOptions]) -> Finding:
    """The DDR tiers' files have room, in memory."""
    first = own[0].ddr_path
    if first is None:
        return Finding(check="shared memory", verdict=Verdict.OK, found="not asked for")
    system = file_system_of(first)
    free = system.free_bytes + sum(held_bytes(each.ddr_path) for each in own if each.ddr_path is not None)
    wanted = sum(each.ddr_bytes for each in own)
    text = f"{_gib(wanted)} of {_gib(free)} free on {system.mounted_on} ({system.kind or 'unknown'}) for {first}"
    if wanted > free:
        advice = "enlarge it (mount -o remount,size=...; docker run --shm-size), lower --ddr, or use --ddr-path none"
        return Finding(check="shared memory", verdict=Verdict.FAIL, found=text, advice=advice)
    if not system.is_memory:
        return Finding(
            check="shared memory",
            verdict=Verdict.WARN,
            found=f"{text}: a disk, to which every block would be written",
            advice="choose a file in /dev/shm with --ddr-path",
        )
    return Finding(check="shared memory", verdict=Verdict.OK, found=text)


def check_disk(own: Sequence[TierOptions]) -> Finding:
    """The NVMe tiers' folder has room."""
    folder = own[0].nvme_dir
    if folder is None:
        return Finding(check="disk", verdict=Verdict.OK, found="no NVMe tier")
    system = file_system_of(folder)
    wanted = sum(each.nvme_bytes for each in own)
    held = sum(_held_in(each.nvme_dir) for each in own if each.nvme_dir is not None)
    free = system.free_bytes + held
    text = f"{_gib(wanted)} of {_gib(free)} free on {system.mounted_on} ({system.kind or 'unknown'}) for {folder}"
    if wanted > free:
        most = free * 9 // 10 // len(own) >> 30
        smaller = f"--nvme {most}GiB for each engine" if most else "--nvme none"
        advice = f"{smaller}, or another disk with --nvme-dir"
        return Finding(check="disk", verdict=Verdict.FAIL, found=text, advice=advice)
    if system.is_memory:
        advice = "choose a folder on a disk with --nvme-dir"
        return Finding(check="disk", verdict=Verdict.WARN, found=f"{text}: main memory, not a disk", advice=advice)
    return Finding(check="disk", verdict=Verdict.OK, found=text)


def check_direct_io(own: Sequence[TierOptions]) -> Finding:
    """The NVMe tiers' disk takes reads and writes past the page cache."""
    folder = own[0].nvme_dir
    if folder is None:
        return Finding(check="direct i/o", verdict=Verdict.OK, found="no NVMe tier")
    existing = nearest_existing(folder)
    problem = direct_io_problem(existing)
    if problem is not None:
        return Finding(
            check="direct i/o",
            verdict=Verdict.WARN,
            found=f"O_DIRECT does not work in {existing}: {problem}; blocks go through the page cache",
            advice="choose a folder on a local disk with --nvme-dir",
        )
    return Finding(check="direct i/o", verdict=Verdict.OK, found=f"O_DIRECT works in {existing}")


def tell_unmeasured(preset: "Preset") -> Finding:
    """Which of the values are no readings."""
    from kvcontrol.presets import Evidence

    if preset.evidence is Evidence.NONE:
        found = f"all of it: no reading is from {preset.hardware}"
        return Finding(check=NOT_MEASURED, verdict=Verdict.WARN, found=found)
    return Finding(check=NOT_MEASURED, verdict=Verdict.OK, found=", ".join(unmeasured_keys(preset)))


def unmeasured_keys(preset: "Preset") -> list[str]:
    """Return the keys of the preset's values that nobody measured on its hardware."""
    return [key for key, value in preset.values().items() if value is not None and key in preset.not_measured]


def _memory_held(path: Path) -> int:
    return held_bytes(path) if file_system_of(path).is_memory else 0


def _held_in(folder: Path) -> int:
    return sum(held_bytes(each) for each in folder.iterdir()) if folder.is_dir() else 0


def _gib(size_bytes: int) -> str:
    amount = size_bytes / 2**30
    return f"{amount:.3g} GiB" if amount < 1000 else f"{amount:.0f} GiB"  # noqa: PLR2004 - three digits
