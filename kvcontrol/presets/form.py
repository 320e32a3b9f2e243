"""A workload part in the form that files have: to be shown, changed and read back."""

from typing import Any

from kvcontrol.presets.parts import NvmePart, WorkloadPart
from kvcontrol.presets.preset import size_text


def workload_form(part: WorkloadPart) -> dict[str, Any]:
    """Return what ``read_workload`` would read this part from."""
    return {
        "summary": part.summary,
        "context_tokens": part.context_tokens,
        "max_batch_size": part.max_batch_size,
        "max_prefill_tokens": part.max_prefill_tokens,
        "itl_target_ms": part.itl_target_ms,
        "load_deadline_s": part.load_deadline_s,
        "ddr": {
            "size": size_text(part.ddr.size_bytes),
            "path": part.ddr.path,
            "high_watermark": part.ddr.high_watermark,
            "low_watermark": part.ddr.low_watermark,
            "policy": part.ddr.policy,
        },
        "nvme": None if part.nvme is None else _nvme_form(part.nvme),
        "quota": {"guaranteed_share": part.quota.guaranteed_share, "burst_share": part.quota.burst_share},
        "not_measured": list(part.not_measured),
    }


def _nvme_form(part: NvmePart) -> dict[str, Any]:
    return {
        "size": size_text(part.size_bytes),
        "high_watermark": part.high_watermark,
        "low_watermark": part.low_watermark,
        "policy": part.policy,
        "write_mode": part.write_mode.value,
    }
