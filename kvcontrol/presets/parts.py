"""The two parts that a preset is made of: what a workload asks for, and what hardware is and allows."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvcontrol.core.quantisation import KVQuantisation
from kvcontrol.core.write_mode import WriteMode
from kvcontrol.kv_policy import POLICIES
from kvcontrol.presets.section import Section

SHIPPED_POLICIES: Final = tuple(POLICIES)
"""A preset names no policy that isn't there."""
DEVICES: Final = ("cuda", "cpu", "ascend", "camb", "none")
"""LMDeploy's names of devices, ``cpu`` (kvgate's own back end), and ``none``: LMDeploy has no back end for it."""
MAX_TOKENS: Final = 10_000_000
MOST_TARGET_MS: Final = 60_000


class Evidence(StrEnum):
    """What is known about kvgate on hardware."""

    MEASURED = "measured"
    """The readings, those of the workloads too, are from it."""
    RUNS = "runs"
    """kvgate runs there; the workloads' readings are from other hardware."""
    NONE = "none"
    """Nobody has run kvgate on it: all of its part is from reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPart:
    """A tier below HBM. Above ``high_watermark`` (a share of its blocks) it makes room until ``low_watermark``."""

    size_bytes: int
    high_watermark: float
    low_watermark: float
    policy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DdrPart(TierPart):
    """Host memory. In ``path``'s file (shared memory) it is found again after the engine was killed."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmePart(TierPart):
    """A file on disk; ``write_mode`` says when a block goes there."""

    write_mode: WriteMode


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaPart:
    """Shares of each tier for one tenant. Above ``burst_share`` it evicts its own blocks first, whoever it is.

    Below ``guaranteed_share`` no other tenant pushes its blocks out: for tenants that are given a guarantee. The
    runtime guarantees nothing to tenants that it was not told of, as there may be any number of them.
    """

    guaranteed_share: float
    burst_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadPart:
    """What a kind of traffic asks of one engine instance. ``nvme`` None means no such tier, ``itl_target_ms`` None the
    engine's own, 0 no target.
    """

    name: str
    summary: str
    context_tokens: int
    max_batch_size: int
    max_prefill_tokens: int
    itl_target_ms: float | None
    ddr: DdrPart
    nvme: NvmePart | None
    load_deadline_s: float
    quota: QuotaPart
    not_measured: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """Options of LMDeploy that go with the hardware; None leaves LMDeploy's default."""

    device: str
    kv_quantisation: str
    piecewise_cudagraph_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The most that makes sense on the hardware, whatever a workload asks for; None is no bound."""

    context_tokens: int | None
    max_batch_size: int | None
    ddr_bytes: int | None
    nvme_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwarePart:
    """What one instance's device is.

    ``recognised_by`` are parts of the names that drivers report. ``memory_bytes`` None: no source that we trust.
    """

    name: str
    summary: str
    evidence: Evidence
    recognised_by: tuple[str, ...]
    memory_bytes: int | None
    host_cores: int
    block_tokens: int
    hbm_share: float | None
    load_deadline_s: float | None
    engine: EngineFlags
    at_most: Bounds
    not_measured: tuple[str, ...]


WORKLOAD_KEYS: Final = (
    *("context_tokens", "max_batch_size", "max_prefill_tokens", "itl_target_ms", "load_deadline_s"),
    *("ddr.size", "ddr.path", "ddr.high_watermark", "ddr.low_watermark", "ddr.policy"),
    *("nvme.size", "nvme.high_watermark", "nvme.low_watermark", "nvme.policy", "nvme.write_mode"),
    *("quota.guaranteed_share", "quota.burst_share"),
)
HARDWARE_KEYS: Final = (
    *("memory", "host_cores", "block_tokens", "hbm_share", "load_deadline_s"),
    *("engine.device", "engine.kv_quantisation", "engine.piecewise_cudagraph_tokens"),
    *("at_most.context_tokens", "at_most.max_batch_size", "at_most.ddr", "at_most.nvme"),
)


def read_workload(name: str, section: Section) -> WorkloadPart:
    """Read one of ``workloads``; problems are noted in the section's document."""
    part = WorkloadPart(
        name=name,
        summary=section.text("summary"),
        context_tokens=section.integer("context_tokens", 1, MAX_TOKENS),
        max_batch_size=section.integer("max_batch_size", 1, 4096),
        max_prefill_tokens=section.integer("max_prefill_tokens", 1, MAX_TOKENS),
        itl_target_ms=_target(section) if section.has("itl_target_ms") else None,
        ddr=_ddr(section.section("ddr")),
        nvme=_nvme(section.section("nvme")) if section.has("nvme") else None,
        load_deadline_s=section.number("load_deadline_s", 0.001, 600),
        quota=_quota(section.section("quota")),
        not_measured=section.texts("not_measured", WORKLOAD_KEYS),
    )
    if part.nvme is not None and part.nvme.write_mode is WriteMode.BACK and part.ddr.high_watermark >= 1:
        section.refuse(
            "ddr.high_watermark", "with write_back it must be below 1: from there on blocks are written back"
        )
    section.finish()
    return part


def read_hardware(name: str, section: Section) -> HardwarePart:
    """Read one of ``hardware``; problems are noted in the section's document."""
    part = HardwarePart(
        name=name,
        summary=section.text("summary"),
        evidence=Evidence(section.choice("evidence", tuple(Evidence))),
        recognised_by=section.texts("recognised_by"),
        memory_bytes=section.size("memory") if section.has("memory") else None,
        host_cores=section.integer("host_cores", 1, 1024),
        block_tokens=section.integer("block_tokens", 1, 4096),
        hbm_share=section.number("hbm_share", 0.01, 0.99) if section.has("hbm_share") else None,
        load_deadline_s=section.number("load_deadline_s", 0.001, 600) if section.has("load_deadline_s") else None,
        engine=_flags(section.section("engine")),
        at_most=_bounds(section.section("at_most")),
        not_measured=section.texts("not_measured", HARDWARE_KEYS),
    )
    section.finish()
    return part


def _ddr(section: Section) -> DdrPart:
    path = section.path("path")
    high, low = _watermarks(section)
    part = DdrPart(
        size_bytes=section.size("size"),
        path=path,
        high_watermark=high,
        low_watermark=low,
        policy=section.choice("policy", SHIPPED_POLICIES),
    )
    section.finish()
    return part


def _nvme(section: Section) -> NvmePart:
    high, low = _watermarks(section)
    part = NvmePart(
        size_bytes=section.size("size"),
        high_watermark=high,
        low_watermark=low,
        policy=section.choice("policy", SHIPPED_POLICIES),
        write_mode=WriteMode(section.choice("write_mode", tuple(WriteMode))),
    )
    section.finish()
    return part


def _target(section: Section) -> float:
    target_ms = section.number("itl_target_ms", 0, MOST_TARGET_MS)
    if 0 < target_ms < 1:
        section.refuse("itl_target_ms", "it must be 0 (no target), or 1 or more")
    return target_ms


def _watermarks(section: Section) -> tuple[float, float]:
    high = section.number("high_watermark", 0.01, 1)
    low = section.number("low_watermark", 0.01, 1)
    if low > high:
        section.refuse("low_watermark", f"it must not be above high_watermark ({high:g})")
    return high, low


def _quota(section: Section) -> QuotaPart:
    guaranteed = section.number("guaranteed_share", 0, 1)
    burst = section.number("burst_share", 0.01, 1)
    if guaranteed > burst:
        section.refuse("guaranteed_share", f"it must not be above burst_share ({burst:g})")
    section.finish()
    return QuotaPart(guaranteed_share=guaranteed, burst_share=burst)


def _flags(section: Section) -> EngineFlags:
    flags = EngineFlags(
        device=section.choice("device", DEVICES),
        kv_quantisation=section.choice("kv_quantisation", tuple(KVQuantisation)),
        piecewise_cudagraph_tokens=section.integer("piecewise_cudagraph_tokens", 1, MAX_TOKENS)
        if section.has("piecewise_cudagraph_tokens")
        else None,
    )
    if flags.piecewise_cudagraph_tokens is not None and flags.device != "cuda":
        section.refuse("piecewise_cudagraph_tokens", f"device {flags.device} has no CUDA graphs; leave it out")
    section.finish()
    return flags


def _bounds(section: Section) -> Bounds:
    bounds = Bounds(
        context_tokens=section.integer("context_tokens", 1, MAX_TOKENS) if section.has("context_tokens") else None,
        max_batch_size=section.integer("max_batch_size", 1, 4096) if section.has("max_batch_size") else None,
        ddr_bytes=section.size("ddr") if section.has("ddr") else None,
        nvme_bytes=section.size("nvme") if section.has("nvme") else None,
    )
    section.finish()
    return bounds
