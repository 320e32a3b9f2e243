"""How many examples Hypothesis tries: the same few in every run of the suite, many others in the slow lane."""

from typing import Final

from hypothesis import settings

FULL: Final = "full"
"""The profile of the slow lane: ``pytest --hypothesis-profile=full``."""
QUICK: Final = "quick"
_PART: Final = 4
_LEAST: Final = 15


def examples(full: int, *, least: int = _LEAST) -> int:
    """Return how many of so many to try in this run.

    ``least`` is how many are tried however few a part of them is; fewer where one takes seconds.
    """
    return full if settings.get_current_profile_name() == FULL else min(full, max(least, full // _PART))


__all__ = ["FULL", "QUICK", "examples"]
