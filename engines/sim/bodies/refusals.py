"""What a simulated engine refuses, in LMDeploy's words.

It has no probabilities: a request for them is refused as by an LMDeploy that runs without ``--logprobs-mode``.
"""

from typing import Final

NO_LOGPROBS: Final = "requested but not enabled logprobs_mode in engine configuration"
NO_EXPERTS: Final = "routed experts requested but not configured in engine configuration."
UNPREPARED: Final = "Request preprocessing failed."
NO_IMAGES: Final = "image_data: a simulated engine reads text alone"


class NotServedError(ValueError):
    """A body asks for what isn't served; ``param`` is the field, where the real engine names it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def not_positive(name: str, value: int, kind: str) -> str:
    """Return the refusal of a number below one."""
    return f"The {name} {value} must be a positive {kind}."
