"""Moments of an engine's steps: on a GPU events in its stream, without waiting; elsewhere the process's clock."""

import time
from typing import Any, Final, Protocol

from kvcontrol.core.steps import StepClock

_SPARE_EVENTS: Final = 64


class Moments(Protocol):
    """Takes moments. The engine's thread; nothing here waits for a device."""

    kind: StepClock

    def now(self, stream: Any = None) -> Any:
        """Return an event for the progress up to the work launched from here on, of another ``stream`` if given."""
        ...

    def is_past(self, moment: Any) -> bool:
        """Return whether the device has reached the event."""
        ...

    def between_s(self, earlier: Any, later: Any) -> float:
        """Return the seconds between two moments that are past."""
        ...

    def free(self, moment: Any) -> None:
        """Release an event that is no longer used."""
        ...


class HostMoments:
    """By ``time.perf_counter``: where operations have finished when their calls return."""

    def __init__(self, kind: StepClock = "wall") -> None:
        self.kind: StepClock = kind

    def now(self, stream: Any = None) -> float:
        del stream
        return time.perf_counter()

    def is_past(self, moment: float) -> bool:
        del moment
        return True

    def between_s(self, earlier: float, later: float) -> float:
        return max(0.0, later - earlier)

    def free(self, moment: float) -> None:
        """Nothing to take back."""


class CudaMoments:
    """By events with timing, recorded in ``stream``. They are used again: making one is a driver call."""

    def __init__(self, stream: Any) -> None:
        self.kind: StepClock = "cuda_events"
        self._stream = stream
        self._spare: list[Any] = []

    def now(self, stream: Any = None) -> Any:
        import torch

        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record(self._stream if stream is None else stream)
        return event

    def is_past(self, moment: Any) -> bool:
        return bool(moment.query())

    def between_s(self, earlier: Any, later: Any) -> float:
        return max(0.0, float(earlier.elapsed_time(later)) / 1e3)

    def free(self, moment: Any) -> None:
        if len(self._spare) < _SPARE_EVENTS:
            self._spare.append(moment)
