"""Processes whose wall clock is wrong."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FOLDER = Path(__file__).parent / "skewed_clock"


def skewed(seconds: float) -> dict[str, str]:
    """Return the environment of a Python process whose clock is ahead by so many seconds (behind, where negative)."""
    return {"PYTHONPATH": os.pathsep.join([str(_FOLDER), str(ROOT)]), "TEST_SKEW_S": str(seconds)}


__all__ = ["skewed"]
