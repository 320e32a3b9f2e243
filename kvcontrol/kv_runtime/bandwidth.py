"""Recent bandwidth of a lane: a device that turns slow is noticed within a load or two.

Bytes are divided by busy time, both fading with busy time: a transfer that takes long outweighs at once what was
quick before it. An average of speeds, sample by sample, would need twenty slow samples to forget a fast device. Time in
which nothing but failures came counts too. What is under way and overdue counts before it ends: a device that hangs
finishes nothing that could be measured.
"""

import math
from typing import Final

_SAMPLE_S: Final = 0.02
"""Busy time that makes one sample."""
_MEMORY_S: Final = 0.5
"""Busy time after which a sample counts 1/e of what it did."""


class Bandwidth:
    """Follows one lane; see the module's text. Not thread-safe."""

    __slots__ = ("_bytes", "_from_s", "_sample_bytes", "_seconds")

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0
        self._from_s = 0.0
        self._sample_bytes = 0

    def busy(self, now_s: float) -> None:
        """The lane, at rest before, begins a batch."""
        self._from_s = now_s
        self._sample_bytes = 0

    def ended(self, size_bytes: int, now_s: float, *, at_rest: bool) -> None:
        """A batch has ended with so many bytes moved; ``at_rest``: no other runs."""
        self._sample_bytes += size_bytes
        took_s = now_s - self._from_s
        if took_s >= _SAMPLE_S or (at_rest and took_s > 0):
            kept = math.exp(-took_s / _MEMORY_S)
            self._bytes = kept * self._bytes + self._sample_bytes
            self._seconds = kept * self._seconds + took_s
            self.busy(now_s)

    def bytes_per_s(self, now_s: float, running_bytes: int) -> float | None:
        """Return the speed with ``running_bytes`` under way; None before the first byte has been measured.

        What runs can lower it: had all of that just ended, it would have been no faster.
        """
        if self._bytes <= 0:
            return None
        known = self._bytes / self._seconds
        took_s = now_s - self._from_s
        if running_bytes and took_s > 0:
            return min(known, (self._sample_bytes + running_bytes) / took_s)
        return known
