"""The built-in presets, and those of operators."""

from collections.abc import Callable, Mapping
from typing import Final

from gateway.problems import ProblemKind, Problems
from gateway.state.documents import Kind
from kvcontrol.presets import PresetFileError, Presets, WorkloadPart

RESERVED: Final = frozenset({"current"})
"""Names with another meaning in paths."""


class PresetCatalogue:
    """``own`` returns the stored presets of operators by name, each as the text of its workload."""

    def __init__(self, shipped: Presets, own: Callable[[], Mapping[str, str]], problems: Problems) -> None:
        self.shipped = shipped
        self._own = own
        self._problems = problems
        self._read: Mapping[str, str] = {}
        self._all = shipped

    def is_own(self, name: str) -> bool:
        """Whether an operator made it."""
        return name not in self.shipped.workloads and name in self.all().workloads

    def all(self) -> Presets:
        """Return all presets but those that this version of kvgate can't read: ``problems`` names them."""
        own = self._own()
        if own is not self._read:
            self._read, self._all = own, self.shipped.with_workloads(self._parts(own))
        return self._all

    def _parts(self, own: Mapping[str, str]) -> list[WorkloadPart]:
        parts, unreadable = [], {}
        for name, text in own.items():
            try:
                parts.append(Presets.workload(name, text))
            except PresetFileError as error:
                unreadable[f"{Kind.WORKLOAD}/{name}"] = f"the preset {name!r} can't be read by this version: {error}"
        self._problems.replace(ProblemKind.DOCUMENT, f"{Kind.WORKLOAD}/", unreadable)
        return parts
