"""Errors of one kind of prediction against the observed values."""

import math
import sys
from dataclasses import dataclass

_WEIGHT = 0.05
"""Of the newest prediction in the averages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReport:
    """Averages that fade: ``relative`` is |predicted - actual| / actual, ``bias`` the same with its sign, ``factor``
    what actual values are of predicted ones in the geometric mean. 0, 0 and 1 before the first prediction.
    """

    predictions: int
    relative: float
    bias: float
    factor: float


class PredictionError:
    """Follows predictions of positive quantities and their outcomes. O(1)."""

    def __init__(self) -> None:
        self._predictions = 0
        self._relative = 0.0
        self._bias = 0.0
        self._log_factor = 0.0

    def came(self, *, predicted: float, actual: float) -> None:
        """Follow a prediction whose outcome is known; what isn't > 0 and finite can't be compared and doesn't
        count, nor what differs by more than numbers can say.
        """
        if not (0 < predicted <= sys.float_info.max and 0 < actual <= sys.float_info.max):
            return
        ratio = predicted / actual
        if not (math.isfinite(ratio) and ratio > 0):
            return
        error = ratio - 1
        self._predictions += 1
        weight = max(_WEIGHT, 1 / self._predictions)
        self._relative += weight * (abs(error) - self._relative)
        self._bias += weight * (error - self._bias)
        self._log_factor += weight * (-math.log(ratio) - self._log_factor)

    def report(self) -> ErrorReport:
        """Return the averages."""
        return ErrorReport(
            predictions=self._predictions,
            relative=self._relative,
            bias=self._bias,
            factor=math.exp(self._log_factor),
        )
