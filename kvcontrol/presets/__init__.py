"""Presets: what an engine instance is told for a kind of traffic on a kind of hardware."""

from kvcontrol.presets.catalogue import Presets
from kvcontrol.presets.errors import PresetFileError, UnknownPresetError
from kvcontrol.presets.form import workload_form
from kvcontrol.presets.parts import Evidence, QuotaPart, TierPart, WorkloadPart
from kvcontrol.presets.preset import Preset

__all__ = [
    "Evidence",
    "Preset",
    "PresetFileError",
    "Presets",
    "QuotaPart",
    "TierPart",
    "UnknownPresetError",
    "WorkloadPart",
    "workload_form",
]
