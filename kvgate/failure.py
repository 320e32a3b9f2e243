"""What ends a command with a message instead of a traceback.

CommandError
├── ChildFailedError      a supervised process died or never became ready (``child``)
└── (each command's own refusals are plain CommandErrors)
"""

from typing import Final

INTERRUPTED: Final = 130
"""Exit code of a command that Ctrl-C ended."""


class CommandError(Exception):
    """The command can't go on. ``message`` says what is wrong, ``advice`` what to do; exit code 1."""

    def __init__(self, message: str, advice: str = "") -> None:
        self.message = message
        self.advice = advice
        super().__init__(message)
