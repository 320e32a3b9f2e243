"""The built-in presets, and those of operators."""

import logging
from collections.abc import Callable, Mapping
from typing import Final

from kvcontrol.presets import PresetFileError, Presets, WorkloadPart

RESERVED: Final = frozenset({"current"})
"""Names that stand for something else in paths."""

_log = logging.getLogger(__name__)


class PresetCatalogue:
    """``own`` gives the operators' presets as they are stored now, by name, each as the text of its workload."""

    def __init__(self, shipped: Presets, own: Callable[[], Mapping[str, str]]) -> None:
        self.shipped = shipped
        self._own = own
        self._read: Mapping[str, str] = {}
        self._all = shipped

    def is_own(self, name: str) -> bool:
        """Whether an operator made it."""
        return name not in self.shipped.workloads and name in self.all().workloads

    def all(self) -> Presets:
        """Return all presets. One that this version of kvgate can't read is logged and left out."""
        own = self._own()
        if own is not self._read:
            self._read, self._all = own, self.shipped.with_workloads(self._parts(own))
        return self._all

    def _parts(self, own: Mapping[str, str]) -> list[WorkloadPart]:
        parts = []
        for name, text in own.items():
            try:
                parts.append(Presets.workload(name, text))
            except PresetFileError as error:
                _log.warning("the preset %s can't be used: %s", name, error)
        return parts


__all__ = ["RESERVED", "PresetCatalogue"]
