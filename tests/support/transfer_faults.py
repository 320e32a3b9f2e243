"""Failing transfers in a real instance: the engine's memory and the tiers' file do what a fault plan says.

A plan is a JSON file, read again whenever it changes, so that a test can change it while the instance runs:

    {"engine.write": {"fail": 0.1, "delay_s": 0.02}, "file.read": {"fail": 1.0}}

``fail`` is the share of calls all of whose blocks fail, ``full`` of those that find no room on the device, ``delay_s``
what each call takes longer, or until another plan holds.
"""

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.lmdeploy.offload.memory import EngineMemory
from kvcontrol.kv_runtime import BlockStatus, HostArena, Move
from kvcontrol.kv_runtime.backends.file import FileBackend

_LOOK_EVERY_S = 0.1
PLACES: Mapping[str, tuple[type[Any], str]] = {
    "engine.read": (EngineMemory, "read"),
    "engine.write": (EngineMemory, "write_in_order"),
    "file.read": (FileBackend, "read"),
    "file.write": (FileBackend, "write"),
}


class FaultPlan:
    """What shall go wrong now."""

    def __init__(self, path: Path, *, seed: int = 3) -> None:
        self._path = path
        self._read_at_ns = 0
        self._plan: dict[str, dict[str, float]] = {}
        self._random = random.Random(seed)  # noqa: S311 - faults, not secrets

    @staticmethod
    def write(path: Path, plan: Mapping[str, Mapping[str, float]]) -> None:
        """Let a plan hold from now on; whole or not at all."""
        unknown = set(plan) - set(PLACES)
        assert not unknown, f"no places: {unknown}"
        new = path.with_suffix(".new")
        new.write_text(json.dumps(plan))
        new.replace(path)

    def at(self, place: str) -> tuple[BlockStatus, float]:
        """Return how this call ends, and how long it waits before."""
        changed_ns = self._changed_ns()
        if changed_ns and changed_ns != self._read_at_ns:
            self._plan, self._read_at_ns = json.loads(self._path.read_text()), changed_ns
        fault = self._plan.get(place, {})
        chance = self._random.random()
        status = BlockStatus.OK
        if chance < fault.get("fail", 0.0):
            status = BlockStatus.FAILED
        elif chance < fault.get("fail", 0.0) + fault.get("full", 0.0):
            status = BlockStatus.NO_SPACE
        return status, fault.get("delay_s", 0.0)

    def wait(self, delay_s: float) -> None:
        """Return after so long, or as soon as another plan holds."""
        until_s, held_ns = time.monotonic() + delay_s, self._changed_ns()
        while (left_s := until_s - time.monotonic()) > 0 and self._changed_ns() == held_ns:
            time.sleep(min(left_s, _LOOK_EVERY_S))

    def _changed_ns(self) -> int:
        return self._path.stat().st_mtime_ns if self._path.exists() else 0


def install_faults(plan: FaultPlan, put: Callable[[type[Any], str, Any], None] = setattr) -> None:
    """Put the plan in the way of every transfer of this process; ``put`` as ``setattr``."""
    for place, (owner, name) in PLACES.items():
        put(owner, name, _faulty(plan, place, getattr(owner, name)))


def _faulty(plan: FaultPlan, place: str, original: Callable[..., list[BlockStatus]]) -> Any:
    def moved(self: Any, moves: Sequence[Move], arena: HostArena, *more: Any) -> list[BlockStatus]:
        status, delay_s = plan.at(place)
        plan.wait(delay_s)
        if status is BlockStatus.OK:
            return original(self, moves, arena, *more)
        if place.endswith("read"):
            for move in moves:
                arena.unseal(move.host)
        self.last_error = "a planned fault"
        return [status] * len(moves)

    return moved


__all__ = ["PLACES", "FaultPlan", "install_faults"]
