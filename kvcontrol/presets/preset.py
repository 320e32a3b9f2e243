"""A preset: a workload part and a hardware part, merged into what one engine instance is told.

The merge, key by key:

- what only one part has is taken from there (a workload has no block size, hardware no watermarks);
- ``at_most`` of the hardware lowers what the workload asks for, and each lowering is told in ``notes``;
- the hardware's ``load_deadline_s``, where it has one, takes the place of the workload's: the deadline is about how
  long computing would take instead, and that is the device's matter.
"""

from dataclasses import dataclass, replace

from kvcontrol.presets.parts import (
    HARDWARE_KEYS,
    WORKLOAD_KEYS,
    DdrPart,
    EngineFlags,
    HardwarePart,
    NvmePart,
    QuotaPart,
    WorkloadPart,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """What one instance is told, and what is known about it.

    ``notes`` are what the merge lowered, in words. ``not_measured`` are the keys whose values nobody has measured
    (on this hardware): they are computed, read or chosen, and the file's comments say which.
    """

    name: str
    hardware: str
    summary: str
    tried: bool
    context_tokens: int
    max_batch_size: int
    max_prefill_tokens: int
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


def merge(workload: WorkloadPart, hardware: HardwarePart) -> Preset:
    """Return the preset of a workload on hardware (see the module's text)."""
    bounds = hardware.at_most
    notes: list[str] = []

    def lowered(key: str, wanted: int, bound: int | None, *, is_size: bool = False) -> int:
        if bound is None or wanted <= bound:
            return wanted
        said = (_gib(wanted), _gib(bound)) if is_size else (str(wanted), str(bound))
        notes.append(f"{key} is {said[1]}, the most on {hardware.name}; {workload.name} asks for {said[0]}")
        return bound

    ddr, nvme = workload.ddr, workload.nvme
    ddr = replace(ddr, size_bytes=lowered("ddr.size", ddr.size_bytes, bounds.ddr_bytes, is_size=True))
    if nvme is not None:
        nvme = replace(nvme, size_bytes=lowered("nvme.size", nvme.size_bytes, bounds.nvme_bytes, is_size=True))
    unmeasured = (*workload.not_measured, *hardware.not_measured)
    if not hardware.tried:  # readings of one device say nothing of another
        unmeasured = (*WORKLOAD_KEYS, *HARDWARE_KEYS)
    return Preset(
        name=workload.name,
        hardware=hardware.name,
        summary=workload.summary,
        tried=hardware.tried,
        context_tokens=lowered("context_tokens", workload.context_tokens, bounds.context_tokens),
        max_batch_size=lowered("max_batch_size", workload.max_batch_size, bounds.max_batch_size),
        max_prefill_tokens=workload.max_prefill_tokens,
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
        not_measured=tuple(dict.fromkeys(unmeasured)),
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:g} GiB"


__all__ = ["Preset", "merge"]
