"""Whether what an engine saves arrives: a tier that keeps nothing looks like one that nobody uses."""

from typing import Final

from kvcontrol.kv_runtime import BlockStatus, Finished, Reason

FAILING_SAVES: Final = 8
"""So many saves in a row of which nothing arrived, for faults, are a failing tier."""
_FAULTS: Final = frozenset({Reason.DEVICE, Reason.DEVICE_FULL, Reason.CORRUPT, Reason.STALLED, Reason.DEADLINE})


class SaveHealth:
    """Follows the ends of saves. Those that were refused (no room, not worth it) say nothing of the tier. One thread
    changes it; reading is for any.
    """

    def __init__(self) -> None:
        self.failed_in_a_row = 0
        """Saves since the last one of which a block arrived."""
        self._failure = ""

    @property
    def failure(self) -> str:
        """Why saves fail, empty as long as few do."""
        return self._failure if self.failed_in_a_row >= FAILING_SAVES else ""

    def raised(self, error: str) -> None:
        """Follow a save that could not be begun."""
        self.failed_in_a_row += 1
        self._failure = error

    def ended(self, end: Finished) -> None:
        """Follow a save that has ended. O(blocks)."""
        if any(each.status is BlockStatus.OK for each in end.ends):
            self.failed_in_a_row = 0
            return
        faults = [each.reason for each in end.ends if each.reason in _FAULTS]
        if faults:
            self.raised(f"blocks can't be saved: {faults[0]}")
