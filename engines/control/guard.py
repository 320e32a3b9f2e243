"""Guards against our own failures: LMDeploy's engine loop ends with any exception that reaches it."""

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_Answer = TypeVar("_Answer")
_Given = ParamSpec("_Given")
_log = logging.getLogger(__name__)


class Guard:
    """Runs code that must not raise; counts and logs its failures in the name of ``owner``. One thread."""

    def __init__(self, owner: str = "the KV tiers") -> None:
        self._owner = owner
        self.errors = 0
        self.last_error = ""
        """What the latest failure was, in words."""

    def __call__(
        self,
        what: str,
        otherwise: _Answer,
        work: Callable[_Given, _Answer],
        *args: _Given.args,
        **kwargs: _Given.kwargs,
    ) -> _Answer:
        """Return ``work(...)``, or ``otherwise`` when it raised."""
        try:
            return work(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # that is what it is for
            self.errors += 1
            self.last_error = f"{self._owner} failed to {what}: {error}"
            if self.errors & (self.errors - 1) == 0:  # 1st, 2nd, 4th, 8th...: a log, not a flood
                _log.exception("%s failed to %s (%d failures so far)", self._owner, what, self.errors)
            return otherwise
