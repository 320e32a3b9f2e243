"""Which characters a terminal shows; asks the locale and imports nothing else."""

import locale
import os
import sys

_CHOSEN = ("PYTHONUTF8", "PYTHONIOENCODING")


def locale_is_utf8() -> bool:
    """Return whether the locale is one of UTF-8; Python itself takes C and POSIX for such."""
    if any(os.environ.get(name) for name in _CHOSEN):
        return True
    overruled = bool(sys.flags.utf8_mode) and os.environ.get("LANG") in {"C", "POSIX"}  # LC_CTYPE is Python's own then
    return is_utf8(locale.getencoding()) and not overruled


def is_utf8(encoding: str) -> bool:
    """Return whether an encoding is UTF-8, whatever its spelling."""
    return encoding.lower().replace("-", "").startswith("utf8")
