"""Imported by a Python process before all else where this folder leads ``PYTHONPATH``: its wall clock is wrong then."""

import os
import time

_skew_s = float(os.environ["TEST_SKEW_S"])
_right = time.time


def _wrong() -> float:
    return _right() + _skew_s


time.time = _wrong
