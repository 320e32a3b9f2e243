"""What a migrator's workers report to its owner: ended batches, and blocks that a device has queued.

Any thread adds; the owner's thread takes, in order, and may wait. No report comes in unnoticed.
"""

import threading
from collections import deque

from kvcontrol.kv_runtime.plan import BatchReport, PlanId


class Reports:
    """See the module's text."""

    def __init__(self) -> None:
        self._reports: deque[BatchReport] = deque()
        self._queued: deque[tuple[PlanId, int]] = deque()
        self._reported = threading.Event()

    def __len__(self) -> int:
        """Return the number of batch reports that wait to be taken."""
        return len(self._reports)

    def add(self, report: BatchReport) -> None:
        """Report the end of a batch."""
        self._reports.append(report)
        self._reported.set()

    def queued(self, plan_id: PlanId, blocks: int) -> None:
        """Report that so many blocks of a plan were verified and queued on the device."""
        self._queued.append((plan_id, blocks))
        self._reported.set()

    def take(self) -> list[BatchReport]:
        """Return the batch reports since the last call, in order."""
        if self._reported.is_set():
            self._reported.clear()  # before the reports are taken: none may come in unnoticed
        reports = []
        while self._reports:
            reports.append(self._reports.popleft())
        return reports

    def take_queued(self) -> list[tuple[PlanId, int]]:
        """Return plans, and how many of their blocks were verified and queued on the device since the last call.

        Whatever the engine queues after a ``join`` of its backend finds them. Their reports come as ever.
        """
        queued = []
        while self._queued:
            queued.append(self._queued.popleft())
        return queued

    def wait(self, timeout_s: float) -> bool:
        """Wait, without the GIL, until there is something to take; False when there was nothing in that time."""
        return self._reported.wait(timeout_s)
