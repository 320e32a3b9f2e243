"""What ``kvgate top`` knows of a gateway: asked in a thread of its own, so that keys are answered while it waits."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any, Final

from kvgate.admin.client import AdminClient
from kvgate.failure import CommandError

EVERY_S: Final = 2.0
_SHADOWS_EVERY_S: Final = 10.0
_KEPT: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One moment: the gateway's status, the shadows, and the intervals so far. ``problem`` is why it is not newer."""

    status: dict[str, Any]
    shadows: dict[str, Any] | None
    shadows_problem: str | None
    intervals: tuple[dict[str, Any], ...]
    at_s: float
    problem: CommandError | None = None


@dataclass(slots=True)
class Feed:
    """Asks one gateway again and again. ``latest`` may be read from any thread: it is replaced, never changed."""

    client: AdminClient
    latest: Known | None = None
    _shadows: dict[str, Any] | None = None
    _shadows_problem: str | None = None
    _shadows_at_s: float | None = None
    _end: threading.Event = field(default_factory=threading.Event)
    _new: threading.Event = field(default_factory=threading.Event)

    def ask(self) -> Known:
        """Ask once and return what is known then; raises ``CommandError``."""
        before = () if self.latest is None else self.latest.intervals
        process = "" if self.latest is None else self.latest.status["process"]
        number = before[-1]["number"] if before else 0
        status = self.client.call("GET", f"/status?after={number}&process={process}").body
        if not isinstance(status, dict) or not {"instances", "intervals", "process", "tenants"} <= status.keys():
            raise CommandError(
                "the gateway's status cannot be read", "check that gateway and command have the same version"
            )
        if status["process"] != process:
            before = ()
        self._ask_for_shadows()
        self.latest = Known(
            status=status,
            shadows=self._shadows,
            shadows_problem=self._shadows_problem,
            intervals=(*before, *status["intervals"])[-_KEPT:],
            at_s=time.monotonic(),
        )
        return self.latest

    def start(self) -> None:
        """Go on asking in a thread that ends with the process, or with ``stop``."""
        threading.Thread(target=self._run, name="top", daemon=True).start()

    def stop(self) -> None:
        self._end.set()

    def changed(self) -> bool:
        """Whether there is something new since the last call."""
        new = self._new.is_set()
        self._new.clear()
        return new

    def _run(self) -> None:
        while not self._end.wait(EVERY_S):
            try:
                self.ask()
            except CommandError as error:
                if (old := self.latest) is not None:
                    self.latest = Known(
                        status=old.status,
                        shadows=old.shadows,
                        shadows_problem=old.shadows_problem,
                        intervals=old.intervals,
                        at_s=old.at_s,
                        problem=error,
                    )
            self._new.set()

    def _ask_for_shadows(self) -> None:
        """Every ten seconds: it asks each instance. A fleet without policies is no failure of the whole."""
        now_s = time.monotonic()
        if self._shadows_at_s is not None and now_s - self._shadows_at_s < _SHADOWS_EVERY_S:
            return
        self._shadows_at_s = now_s
        try:
            self._shadows, self._shadows_problem = self.client.call("GET", "/policies/shadow").body, None
        except CommandError as error:
            self._shadows_problem = error.message
