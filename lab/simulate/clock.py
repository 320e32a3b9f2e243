"""The one clock of a simulated fleet."""


class SimClock:
    """Says what it was told last; only its owner moves it, and never back."""

    __slots__ = ("now_s",)

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s
