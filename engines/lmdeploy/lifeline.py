"""An instance is a server process and an engine process; neither may outlive the other.

LMDeploy's server notices that its engine process died, fails what is in flight, answers 503 on ``/health`` and then
stays for ever. Here it exits with ``ENGINE_DIED_EXIT_CODE`` and a message, so that whoever started it can start it
again. The other way round the kernel kills the engine process with its parent (Linux), and a thread watches the
parent where the kernel can't.
"""

import asyncio
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import wraps
from typing import Any

from engines.lmdeploy.agent import loop_started

ENGINE_DIED_EXIT_CODE = 70  # EX_SOFTWARE
_ANSWER_CLIENTS_S = 1.0
_PR_SET_PDEATHSIG = 1

_engine_sentinels: list[int] = []
"""Of the engine processes that this process started: readable once the process has ended."""


def watch_engine(original: Any) -> Any:
    """Wrap ``ZMQMPEngine._start_mp_proc``: once the process runs, its end is the end of this one."""

    @wraps(original)
    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        os.register_at_fork(after_in_child=die_with_parent)  # LMDeploy forks a multiprocessing manager while it starts
        original(self, *args, **kwargs)
        self.kvgate_closing = threading.Event()
        process = self.proc
        _engine_sentinels.append(process.sentinel)
        threading.Thread(
            target=_exit_with_engine, args=(process, self.kvgate_closing), name="kvgate-engine-watch", daemon=True
        ).start()

    return start


def engine_gone() -> bool:
    """Tell whether an engine process that this process started has ended; any thread, at once."""
    return bool(_engine_sentinels and multiprocessing.connection.wait(_engine_sentinels, 0))


class _ReleasedByPeer:
    """A manager's condition whose last release may find the manager gone.

    LMDeploy's child notifies its parent while it holds the condition; the parent may wake, read the port and shut the
    manager down before the child's release has been answered, and the child then died of ``EOFError`` at start-up.
    """

    def __init__(self, condition: Any) -> None:
        self._condition = condition

    def __enter__(self) -> Any:
        return self._condition.__enter__()

    def __exit__(self, *raised: object) -> None:
        with suppress(EOFError, ConnectionError):
            self._condition.__exit__(*raised)

    def notify(self) -> None:
        self._condition.notify()


def engine_process(original: Any) -> Any:
    """Wrap ``ZMQMPEngine._mp_proc``, what the engine process runs."""
    function = original.__func__

    @wraps(function)
    def run(shared_dict: Any, condition: Any, *args: Any, **kwargs: Any) -> None:
        function(shared_dict, _ReleasedByPeer(condition), *args, **kwargs)

    return staticmethod(run)


def engine_loop(original: Any) -> Any:
    """Wrap ``Engine.async_loop``: an engine process whose loop failed ends, and its instance with it.

    LMDeploy logs the failure and lets the process live on without an engine. An engine in the process of its user (no
    parent that spawned it) only raises, as before.
    """

    @wraps(original)
    async def loop(self: Any) -> None:
        loop_started(self)
        try:
            await original(self)
        except Exception as error:
            if multiprocessing.parent_process() is None:
                raise
            await asyncio.sleep(_ANSWER_CLIENTS_S)
            _last_words(f"the engine loop failed ({type(error).__name__}: {error}), the engine process exits")
            os._exit(ENGINE_DIED_EXIT_CODE)

    return loop


def closing(original: Any) -> Any:
    """Wrap ``ZMQMPEngine.close``: from here on the engine process may end."""

    @wraps(original)
    def close(self: Any) -> None:
        self.kvgate_closing.set()
        original(self)

    return close


def _exit_with_engine(process: Any, closing_: threading.Event) -> None:
    multiprocessing.connection.wait([process.sentinel])
    if closing_.is_set():
        return
    time.sleep(_ANSWER_CLIENTS_S)  # LMDeploy fails its pending requests; let those answers reach their clients
    if closing_.is_set():
        return
    _last_words(f"the engine process {process.pid} died ({_ending(process.exitcode)}), the instance exits")
    os._exit(ENGINE_DIED_EXIT_CODE)


def _last_words(text: str) -> None:
    """Say why a process is about to end, without its logging, which may be gone."""
    print(f"kvgate engine: {text}", file=sys.stderr, flush=True)  # noqa: T201


def _ending(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"


def die_with_parent() -> None:
    """Bind this process to its parent: when that ends, however it ends, the kernel kills this one (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def follow_parent() -> None:
    """Bind this process, just spawned, to its parent; a thread asks once a second where the kernel can't be told.

    (``multiprocessing.parent_process()`` is not known yet while a spawned child runs its main module's top level.)
    """
    parent = os.getppid()
    die_with_parent()

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(ENGINE_DIED_EXIT_CODE)

    threading.Thread(target=follow, name="kvgate-follow-parent", daemon=True).start()
