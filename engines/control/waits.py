"""Waiting times and outcomes of an engine's queued requests, by priority class."""

from bisect import bisect_left

from kvcontrol.core.policy_control import WAIT_BUCKETS_S, ClassWaits
from kvcontrol.core.priority import Priority


class _Counts:
    __slots__ = ("buckets", "left", "longest_s", "started", "wait_s", "waiting")

    def __init__(self) -> None:
        self.waiting = self.started = self.left = 0
        self.wait_s = self.longest_s = 0.0
        self.buckets = [0] * (len(WAIT_BUCKETS_S) + 1)


class WaitCounts:
    """Counted on the engine's thread, read on any: numbers may be a moment apart."""

    def __init__(self) -> None:
        self._classes = {priority: _Counts() for priority in Priority}

    def came(self, priority: Priority) -> None:
        self._classes[priority].waiting += 1

    def gone(self, priority: Priority) -> None:
        """One no longer waits, for whatever reason."""
        self._classes[priority].waiting -= 1

    def started(self, priority: Priority, wait_s: float) -> None:
        """One was started for the first time."""
        counts = self._classes[priority]
        counts.started += 1
        counts.wait_s += wait_s
        counts.longest_s = max(counts.longest_s, wait_s)
        counts.buckets[bisect_left(WAIT_BUCKETS_S, wait_s)] += 1

    def left(self, priority: Priority) -> None:
        """One left without having been started."""
        self._classes[priority].left += 1

    def nobody_waits(self) -> None:
        """Begin a new count of the waiting requests."""
        for counts in self._classes.values():
            counts.waiting = 0

    def report(self) -> dict[str, ClassWaits]:
        return {
            priority.value: ClassWaits(
                waiting=counts.waiting,
                started=counts.started,
                left=counts.left,
                wait_s=counts.wait_s,
                longest_wait_s=counts.longest_s,
                buckets=list(counts.buckets),
            )
            for priority, counts in self._classes.items()
        }
