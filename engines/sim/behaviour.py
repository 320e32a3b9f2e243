"""How one simulated engine differs from its profile."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """``jitter`` is the spread (sigma of a log-normal) of steps' times, by ``seed``; ``slow`` multiplies all times;
    ``corrupt_share`` of the blocks that are loaded come wrong.
    """

    seed: int = 0
    jitter: float = 0.0
    slow: float = 1.0
    corrupt_share: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter is {self.jitter}; allowed is 0 to 1")
        if not (self.slow > 0 and math.isfinite(self.slow)):
            raise ValueError(f"slow is {self.slow}; it must be > 0 and finite")
        if not 0 <= self.corrupt_share <= 1:
            raise ValueError(f"corrupt_share is {self.corrupt_share}; allowed is 0 to 1")


__all__ = ["Behaviour"]
