"""A call that can be interrupted in its midst and goes on later, whatever lies between it and that place."""

import threading
from collections.abc import Callable
from typing import Any


class SteppedCall:
    """Runs a call on a thread of its own, a part at a time. Only one of the two threads runs at any moment, so what
    both use needs no lock; a call that is never resumed to its end keeps a daemon thread.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name="kvgate-stepped-call", daemon=True)
        self._error: BaseException | None = None
        self.result: Any = None
        self.is_over = False

    def resume(self) -> bool:
        """Let the call go on until it pauses; return whether it is over. What it raises is raised here."""
        if self._thread.ident is None:
            self._thread.start()
        elif not self.is_over:
            self._turn.release()
        else:
            return True
        self._back.acquire()
        if self._error is not None:
            raise self._error
        return self.is_over

    def pause(self) -> None:
        """Return to whoever resumed; for the call itself."""
        self._back.release()
        self._turn.acquire()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:  # noqa: BLE001 - it is raised where the call is resumed
            self._error = error
        finally:
            self.is_over = True
            self._back.release()
