"""What a simulated engine has done so far."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the engine began. ``computed_tokens`` are those of all prefills, preempted sequences' included."""

    requests: int = 0
    ended: int = 0
    cancelled: int = 0
    preemptions: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    busy_s: float = 0.0
    steps: int = 0
