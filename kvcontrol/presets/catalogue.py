"""The presets that come along: ``kv_runtime_presets.yaml`` beside this module, or a file of the same form."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final, Self

from kvcontrol.presets.document import parse
from kvcontrol.presets.errors import PresetFileError, UnknownPresetError
from kvcontrol.presets.parts import HardwarePart, WorkloadPart, read_hardware, read_workload
from kvcontrol.presets.preset import Preset, merge
from kvcontrol.presets.section import Section

FILE: Final = "kv_runtime_presets.yaml"
SCHEMA: Final = 1
"""The form of the file; a file of another form is refused rather than misread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Presets:
    """All workloads and hardware of one file, by name."""

    workloads: dict[str, WorkloadPart]
    hardware: dict[str, HardwarePart]

    @classmethod
    @cache
    def shipped(cls) -> Self:
        """Return those that come along; they are read once."""
        return cls.parse(files("kvcontrol.presets").joinpath(FILE).read_text(encoding="utf-8"), file=FILE)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file; raises ``PresetFileError``, also when it can't be read."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PresetFileError(f"{path}: can't be read: {error}") from error
        return cls.parse(text, file=str(path))

    @classmethod
    def parse(cls, text: str, *, file: str) -> Self:
        """Read text; raises ``PresetFileError`` with a line for each problem."""
        document = parse(text, file=file)
        root = Section(document, document.root, "")
        root.integer("schema", SCHEMA, SCHEMA)
        workloads = {name: read_workload(name, part) for name, part in root.section("workloads").sections()}
        hardware = {name: read_hardware(name, part) for name, part in root.section("hardware").sections()}
        root.finish()
        document.check()
        return cls(workloads=workloads, hardware=hardware)

    @staticmethod
    def workload(name: str, text: str) -> WorkloadPart:
        """Read one workload, written as in the file or as JSON; raises ``PresetFileError``."""
        document = parse(text, file=name)
        part = read_workload(name, Section(document, document.root, ""))
        document.check()
        return part

    def with_workloads(self, more: Iterable[WorkloadPart]) -> Self:
        """Return these and more; a name that is there already keeps its meaning."""
        return replace(self, workloads={each.name: each for each in more} | self.workloads)

    def preset(self, name: str, hardware: str) -> Preset:
        """Return a workload on hardware; raises ``UnknownPresetError``."""
        if name not in self.workloads:
            raise UnknownPresetError(f"unknown preset {name!r}; known: {', '.join(self.workloads)}")
        if hardware not in self.hardware:
            raise UnknownPresetError(f"unknown hardware {hardware!r}; known: {', '.join(self.hardware)}")
        return merge(self.workloads[name], self.hardware[hardware])

    def recognise(self, device_name: str) -> str | None:
        """Return which hardware a driver's name for a device stands for, None when it is none of these."""
        wanted = device_name.casefold()
        for name, part in self.hardware.items():
            if any(each.casefold() in wanted for each in part.recognised_by):
                return name
        return None
