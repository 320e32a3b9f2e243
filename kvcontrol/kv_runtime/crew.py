"""Workers that carry batches: threads, or the caller.

``ThreadCrew`` is what runs; ``SteppedCrew`` is its reference, in which nothing happens until it is asked to.
"""

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Protocol

from kvcontrol.kv_runtime.lane import LaneName

_log = logging.getLogger(__name__)

Step = Callable[[LaneName, float], bool]
"""Carry one batch of a lane, waiting up to so many seconds for one; False when there was none."""

_IDLE_S: Final = 0.5


class Crew(Protocol):
    """Calls ``step`` for each lane as long as there is work."""

    helpers: int
    """How many pieces of work ``compute`` does at once."""
    faults: int
    """Calls of ``step`` that raised, and threads that died; each is a bug somewhere."""

    def start(self, lanes: Mapping[LaneName, int], step: Step) -> None:
        """Begin work: so many workers a lane."""

    def compute(self, work: Callable[[], list[int]]) -> Callable[[], list[int]]:
        """Begin ``work`` concurrently; the returned function waits for its result."""

    def mend(self) -> None:
        """Replace workers that died. O(workers)."""

    def close(self, timeout_s: float) -> bool:
        """Stop; False when a worker is still held by a device. Idempotent."""


class ThreadCrew:
    """Daemon threads, so that a device that never answers cannot keep the process from ending.

    ``helpers`` more threads compute checksums. Each block's is a call without the GIL and a way back to it, and beside
    a loop that never stops running Python every way back waits for Python's switch interval, 5 ms, unless others wait
    too. ``switch_interval_s`` sets it, for the whole process, until ``close``; None leaves it alone. With 0.5 ms
    and 8 helpers a load of 64 blocks of 1.8 MB beside such a loop took half as long.
    """

    def __init__(self, *, helpers: int, switch_interval_s: float | None = None) -> None:
        if helpers <= 0:
            raise ValueError(f"{helpers} helper threads; there must be at least 1")
        self.helpers = helpers
        self.faults = 0
        self._interval_s = switch_interval_s
        self._interval_before_s: float | None = None
        self._pool = ThreadPoolExecutor(helpers, thread_name_prefix="kv-checksum")
        self._stopping = threading.Event()
        self._threads: list[tuple[LaneName, threading.Thread]] = []
        self._step: Step | None = None
        self._ended: deque[threading.Thread] = deque()
        """Threads whose work has come to an end; they say so themselves, so that asking costs nothing."""

    def start(self, lanes: Mapping[LaneName, int], step: Step) -> None:
        """See ``Crew``; once."""
        if self._interval_s is not None:
            self._interval_before_s = sys.getswitchinterval()
            sys.setswitchinterval(self._interval_s)
        self._step = step
        for lane, workers in lanes.items():
            for _ in range(workers):
                self._threads.append((lane, self._hire(lane)))

    def compute(self, work: Callable[[], list[int]]) -> Callable[[], list[int]]:
        """See ``Crew``."""
        future: Future[list[int]] = self._pool.submit(work)
        return future.result

    def mend(self) -> None:
        """See ``Crew``."""
        while self._ended and not self._stopping.is_set():
            dead = self._ended.popleft()
            self.faults += 1
            _log.error("the thread %s died; another takes its place", dead.name)
            self._threads = [(lane, self._hire(lane) if thread is dead else thread) for lane, thread in self._threads]

    def close(self, timeout_s: float) -> bool:
        """See ``Crew``; ``timeout_s`` is for all of them together."""
        self._stopping.set()
        until_s = time.monotonic() + timeout_s
        for _, thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._interval_before_s is not None:
            sys.setswitchinterval(self._interval_before_s)
            self._interval_before_s = None
        return not any(thread.is_alive() for _, thread in self._threads)

    def _hire(self, lane: LaneName) -> threading.Thread:
        thread = threading.Thread(target=self._work, args=(lane,), name=f"kv-{lane}", daemon=True)
        thread.start()
        return thread

    def _work(self, lane: LaneName) -> None:
        step = self._step
        try:
            while step is not None and not self._stopping.is_set():
                try:
                    step(lane, _IDLE_S)
                except Exception:  # noqa: BLE001 - a bug that shows in one batch must not end the lane
                    self.faults += 1
                    _log.exception("carrying blocks through %s failed in a way that no backend may", lane)
        finally:
            self._ended.append(threading.current_thread())


class SteppedCrew:
    """Works only within ``run``: on the caller's thread, in the caller's order."""

    def __init__(self) -> None:
        self.helpers = 1
        self.faults = 0
        self._lanes: tuple[LaneName, ...] = ()
        self._step: Step | None = None

    def start(self, lanes: Mapping[LaneName, int], step: Step) -> None:
        """See ``Crew``; once."""
        self._lanes = tuple(lanes)
        self._step = step

    def compute(self, work: Callable[[], list[int]]) -> Callable[[], list[int]]:
        """See ``Crew``."""
        return work

    def mend(self) -> None:
        """See ``Crew``."""

    def close(self, timeout_s: float) -> bool:  # noqa: ARG002 - there is nothing to wait for
        """See ``Crew``."""
        self._step = None
        return True

    def run_one(self, lane: LaneName) -> bool:
        """Carry one batch of a lane; False when none waits."""
        if self._step is None or lane not in self._lanes:
            return False
        try:
            return self._step(lane, 0.0)
        except Exception:  # noqa: BLE001 - what a thread does with it, too
            self.faults += 1
            return True

    def run(self) -> int:
        """Carry batches, one of each lane in rotation, until none waits; returns how many."""
        carried = 0
        while ran := sum(self.run_one(lane) for lane in self._lanes):
            carried += ran
        return carried
