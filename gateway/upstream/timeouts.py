"""How long each stage of a request to an instance may take."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds, all > 0. ``connect_s`` to connect; ``first_byte_s`` from sending a request to the first byte of its
    answer (queue and prefill); ``idle_s`` of silence within an answer, or ``hung_s`` (at most ``idle_s``) when its
    instance fails its health checks meanwhile. There is none on the length of an answer.
    """

    connect_s: float
    first_byte_s: float
    idle_s: float
    hung_s: float

    def __post_init__(self) -> None:
        for name in ("connect_s", "first_byte_s", "idle_s", "hung_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it is > 0")
        if self.hung_s > self.idle_s:
            raise ValueError(f"hung_s is {self.hung_s}; it is at most idle_s ({self.idle_s})")
