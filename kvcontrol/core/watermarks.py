"""How full a tier may become before blocks leave it in the background."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermarks:
    """Past ``high`` (a share of the tier's slots in use) blocks go in the background until ``low`` is reached.

    1.0 means: not before somebody needs a slot. ``ValueError`` unless 0 < low <= high <= 1.
    """

    high: float = 1.0
    low: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high <= 1:
            raise ValueError(f"watermarks: high {self.high}, low {self.low}; allowed is 0 < low <= high <= 1")
