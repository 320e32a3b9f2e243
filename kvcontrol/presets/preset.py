"""A preset: a workload part and a hardware part, merged into what one engine instance is told.

The merge, key by key:

- what only one part has is taken from there (a workload has no block size, hardware no watermarks);
- ``at_most`` of the hardware lowers what the workload asks for, and each lowering is told in ``notes``;
- the workload's ``itl_target_ms`` is for GPUs: elsewhere a step takes longer, and the engine has no target;
- the hardware's ``load_deadline_s``, where it has one, takes the place of the workload's: the deadline is about how
  long computing would take instead, and that is the device's matter.
"""

from dataclasses import dataclass, replace
from typing import Final

from kvcontrol.presets.parts import (
    HARDWARE_KEYS,
    WORKLOAD_KEYS,
    DdrPart,
    EngineFlags,
    Evidence,
    HardwarePart,
    NvmePart,
    QuotaPart,
    WorkloadPart,
)

_UNITS: Final = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """What one instance is told, and what is known about it.

    ``notes`` are what the merge lowered, in words. ``not_measured`` are the keys whose values nobody has measured
    (on this hardware): they are computed, read or chosen, and the file's comments say which.
    """

    name: str
    hardware: str
    summary: str
    evidence: Evidence
    context_tokens: int
    max_batch_size: int
    max_prefill_tokens: int
    itl_target_ms: float | None
    block_tokens: int
    hbm_share: float | None
    memory_bytes: int | None
    host_cores: int
    ddr: DdrPart
    nvme: NvmePart | None
    load_deadline_s: float
    quota: QuotaPart
    engine: EngineFlags
    notes: tuple[str, ...]
    not_measured: tuple[str, ...]

    def values(self) -> dict[str, str | int | float | None]:
        """Return what the instance is told, under the file's keys and in the file's form."""
        ddr, nvme, flags = self.ddr, self.nvme, self.engine
        preset_flags: dict[str, str | int | float | None] = {
            "context_tokens": self.context_tokens,
            "max_batch_size": self.max_batch_size,
            "max_prefill_tokens": self.max_prefill_tokens,
            "itl_target_ms": self.itl_target_ms,
            "block_tokens": self.block_tokens,
            "hbm_share": self.hbm_share,
            "load_deadline_s": self.load_deadline_s,
            "ddr.size": size_text(ddr.size_bytes),
            "ddr.path": ddr.path,
            "ddr.high_watermark": ddr.high_watermark,
            "ddr.low_watermark": ddr.low_watermark,
            "ddr.policy": ddr.policy,
        }
        if nvme is None:
            preset_flags["nvme"] = None
        else:
            preset_flags |= {
                "nvme.size": size_text(nvme.size_bytes),
                "nvme.high_watermark": nvme.high_watermark,
                "nvme.low_watermark": nvme.low_watermark,
                "nvme.policy": nvme.policy,
                "nvme.write_mode": nvme.write_mode.value,
            }
        return preset_flags | {
            "quota.guaranteed_share": self.quota.guaranteed_share,
            "quota.burst_share": self.quota.burst_share,
            "engine.device": flags.device,
            "engine.kv_quantisation": flags.kv_quantisation,
            "engine.piecewise_cudagraph_tokens": flags.piecewise_cudagraph_tokens,
        }


def merge(workload: WorkloadPart, hardware: HardwarePart) -> Preset:
    """Return the preset of a workload on hardware (see the module's text)."""
    bounds = hardware.at_most
    notes: list[str] = []

    def lowered(key: str, wanted: int, bound: int | None, *, is_size: bool = False) -> int:
        if bound is None or wanted <= bound:
            return wanted
        texts = (size_text(wanted), size_text(bound)) if is_size else (str(wanted), str(bound))
        notes.append(f"{key} is {texts[1]}, the most for {hardware.name}; {workload.name} asks for {texts[0]}")
        return bound

    ddr, nvme = workload.ddr, workload.nvme
    ddr = replace(ddr, size_bytes=lowered("ddr.size", ddr.size_bytes, bounds.ddr_bytes, is_size=True))
    if nvme is not None:
        nvme = replace(nvme, size_bytes=lowered("nvme.size", nvme.size_bytes, bounds.nvme_bytes, is_size=True))
    # Readings of one device say nothing of another.
    of_workload = workload.not_measured if hardware.evidence is Evidence.MEASURED else WORKLOAD_KEYS
    of_hardware = HARDWARE_KEYS if hardware.evidence is Evidence.NONE else hardware.not_measured
    return Preset(
        name=workload.name,
        hardware=hardware.name,
        summary=workload.summary,
        evidence=hardware.evidence,
        context_tokens=lowered("context_tokens", workload.context_tokens, bounds.context_tokens),
        max_batch_size=lowered("max_batch_size", workload.max_batch_size, bounds.max_batch_size),
        max_prefill_tokens=workload.max_prefill_tokens,
        itl_target_ms=workload.itl_target_ms if hardware.engine.device == "cuda" else None,
        block_tokens=hardware.block_tokens,
        hbm_share=hardware.hbm_share,
        memory_bytes=hardware.memory_bytes,
        host_cores=hardware.host_cores,
        ddr=ddr,
        nvme=nvme,
        load_deadline_s=workload.load_deadline_s if hardware.load_deadline_s is None else hardware.load_deadline_s,
        quota=workload.quota,
        engine=hardware.engine,
        notes=tuple(notes),
        not_measured=tuple(dict.fromkeys((*of_workload, *of_hardware))),
    )


def size_text(size_bytes: int) -> str:
    """Return a size as the file has it, in the largest unit that divides it."""
    unit, name = next((each for each in _UNITS if size_bytes % each[0] == 0), (1, "B"))
    return f"{size_bytes // unit}{name}"
