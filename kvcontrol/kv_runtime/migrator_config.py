"""How blocks are carried between tiers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MigratorConfig:
    """``batch_bytes`` is what runs at once in a worker's hands (a block where that is larger) on a way that touches the
    durable tier, ``engine_batch_bytes`` from the engine to DDR, ``load_batch_bytes`` from DDR to the engine. A link
    needs few and large batches, since each costs a few turns of the interpreter beside a busy engine; what is loaded
    is checked while it moves, and an engine that keeps an order goes on when all of it is checked, so a load is
    best carried whole. A disk is slow enough to let urgent work wait for small ones only.

    Loads of ``check_ahead_bytes`` and more are verified from the moment they are planned; smaller ones take no time.

    ``queue_blocks`` may wait at each priority in each lane. ``stall_after_s``: a lane whose device has not answered
    for so long takes nothing new. ``fence_slice_s`` is how long a worker waits for one plan's fence before it looks
    after others. ``ValueError`` for what is not > 0.
    """

    batch_bytes: int = 16 << 20
    engine_batch_bytes: int = 128 << 20
    load_batch_bytes: int = 8 << 30
    check_ahead_bytes: int = 128 << 20
    queue_blocks: int = 4096
    engine_workers: int = 2
    durable_workers: int = 4
    stall_after_s: float = 5.0
    fence_slice_s: float = 0.02

    def __post_init__(self) -> None:
        for name in (
            "batch_bytes",
            "engine_batch_bytes",
            "load_batch_bytes",
            "check_ahead_bytes",
            "queue_blocks",
            "engine_workers",
            "durable_workers",
            "stall_after_s",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be > 0")
        if self.fence_slice_s <= 0:
            raise ValueError(f"fence_slice_s is {self.fence_slice_s}; it must be > 0")
