"""Presets: what an engine instance is told for a kind of traffic on a kind of hardware."""

from kvcontrol.presets.catalogue import Presets
from kvcontrol.presets.errors import PresetError, PresetFileError, UnknownPresetError
from kvcontrol.presets.form import workload_form
from kvcontrol.presets.parts import (
    Bounds,
    DdrPart,
    EngineFlags,
    Evidence,
    HardwarePart,
    NvmePart,
    QuotaPart,
    TierPart,
    WorkloadPart,
)
from kvcontrol.presets.preset import Preset, merge

__all__ = [
    "Bounds",
    "DdrPart",
    "EngineFlags",
    "Evidence",
    "HardwarePart",
    "NvmePart",
    "Preset",
    "PresetError",
    "PresetFileError",
    "Presets",
    "QuotaPart",
    "TierPart",
    "UnknownPresetError",
    "WorkloadPart",
    "merge",
    "workload_form",
]
