"""Several gateway processes on one address: started, started again when one dies, stopped together.

All workers accept from one listening socket, so when a worker dies, another one accepts the waiting connections. At a
stop the kernel drops new connection attempts, the workers accept the waiting connections, and then all close the
socket: no connection is lost. A worker ends with this process, also after SIGKILL: it watches a pipe that closes then.
"""

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final

from gateway.http.listener import refuse_all, take_no_more

_POLL_S: Final = 0.1
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 10.0
_STEADY_S: Final = 10.0
_MOST_FALSE_STARTS: Final = 3
_STOP_SLACK_S: Final = 10.0
_LAST_CONNECTIONS_S: Final = 2.0
"""For workers to accept the waiting connections."""
WORKERS_LATER_S: Final = 0.5
"""Workers close the socket so long after the kernel drops new attempts: by then all waiting ones are accepted."""

_log = logging.getLogger("gateway")


@dataclass(slots=True)
class _Worker:
    number: int
    process: "subprocess.Popen[bytes] | None" = None
    started_s: float = 0.0
    pause_s: float = _FIRST_PAUSE_S
    false_starts: int = 0
    again_s: float = field(default=0.0)


class Workers:
    """Runs ``count`` processes of ``python -m gateway`` until a stop signal."""

    def __init__(
        self, count: int, *, arguments: Sequence[str], listener: socket.socket, notice_s: float, grace_s: float
    ) -> None:
        self._arguments = arguments
        self._listener = listener
        self._notice_s = notice_s
        self._grace_s = grace_s
        self._workers = [_Worker(number) for number in range(count)]
        self._stopping = False
        self._steady = False
        """Whether a worker has served for a while: then another one that does not start stops nothing."""
        self._code = 0

    def run(self) -> int:
        """Run until a stop signal, and return 0; or return the exit code of a worker that never starts."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        watched, held = os.pipe()
        folder = Path(tempfile.mkdtemp(prefix="kvgate-workers-"))
        try:
            while not self._stopping:
                for worker in self._workers:
                    self._look_after(worker, watched, folder)
                time.sleep(_POLL_S)
            self._end()
        finally:
            os.close(held)
            os.close(watched)
            shutil.rmtree(folder, ignore_errors=True)
        return self._code

    def _look_after(self, worker: _Worker, lifeline: int, folder: Path) -> None:
        now_s = time.monotonic()
        if worker.process is None:
            if now_s >= worker.again_s:
                self._start(worker, lifeline, folder)
            return
        code = worker.process.poll()
        if code is None:
            self._steady = self._steady or now_s - worker.started_s >= _STEADY_S
            return
        worker.process = None
        if now_s - worker.started_s >= _STEADY_S:
            worker.pause_s, worker.false_starts, self._steady = _FIRST_PAUSE_S, 0, True
        else:
            worker.false_starts += 1
        if code > 0 and worker.false_starts >= _MOST_FALSE_STARTS and not self._steady:
            _log.error("worker %d does not start (exit code %d); stopping", worker.number, code)
            self._stopping, self._code = True, code
            return
        _log.error("worker %d ended with %d; it starts again in %.1f s", worker.number, code, worker.pause_s)
        worker.again_s = now_s + worker.pause_s
        worker.pause_s = min(worker.pause_s * 2, _LONGEST_PAUSE_S)

    def _start(self, worker: _Worker, lifeline: int, folder: Path) -> None:
        descriptor = self._listener.fileno()
        inner = ["--worker", f"{worker.number}/{len(self._workers)}", "--worker-folder", str(folder)]
        inner += ["--listen-fd", str(descriptor), "--lifeline-fd", str(lifeline)]
        worker.process = subprocess.Popen(  # noqa: S603 - this program, with its own arguments
            [sys.executable, "-m", "gateway", *self._arguments, *inner],
            pass_fds=(descriptor, lifeline),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in the terminal reaches this process alone, which stops the workers
        )
        worker.started_s = time.monotonic()

    def _end(self) -> None:
        """Stop all workers, by SIGKILL after the grace period; shut the socket down before they close it."""
        running = [each.process for each in self._workers if each.process is not None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        time.sleep(self._notice_s)
        take_no_more(self._listener, limit_s=_LAST_CONNECTIONS_S)
        refuse_all(self._listener)  # a worker that hangs would keep it open and accept nothing
        self._listener.close()
        deadline_s = time.monotonic() + self._grace_s + _STOP_SLACK_S
        for process in running:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._stopping = True


def end_with(lifeline: int) -> None:
    """Send SIGTERM to this process when its parent has ended."""

    def watch() -> None:
        os.read(lifeline, 1)  # the parent writes nothing: this returns when it has ended
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
