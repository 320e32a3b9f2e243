"""What can be wrong with an instance, on purpose: shares of requests, events and blocks that go wrong, by seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields

from engines.sim.behaviour import LEAST_FACTOR, MOST_FACTOR
from engines.sim.sink import BlockSink, StoredBlock
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockHash


class InjectedFaultError(ConnectionAbortedError):
    """An answer is cut off because it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """``slow`` multiplies all times. Shares, each 0 to 1: of requests that are refused with a 503 (``refuse``), of
    answers that break off at some token (``die``), of KV events that nobody hears of (``lose_events``), of blocks that
    come wrong from a tier below HBM (``corrupt``). ``capacity_lie`` multiplies the batch and the blocks that it names.
    """

    slow: float = 1.0
    refuse: float = 0.0
    die: float = 0.0
    lose_events: float = 0.0
    corrupt: float = 0.0
    capacity_lie: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in {"slow", "capacity_lie"}:
                if not LEAST_FACTOR <= value <= MOST_FACTOR:
                    raise ValueError(f"{field.name} is {value}; allowed is {LEAST_FACTOR:g} to {MOST_FACTOR:,.0f}")
            elif not 0 <= value <= 1:
                raise ValueError(f"{field.name} is {value}; allowed is 0 to 1")

    def reported(self, count: int) -> int:
        """Return what it says that it has so many of."""
        return max(1, round(count * self.capacity_lie)) if count else 0


class LossySink:
    """Passes on what it hears, but for a share of it."""

    def __init__(self, sink: BlockSink, *, share: float, rng: random.Random) -> None:
        self._sink = sink
        self._share = share
        self._rng = rng
        self.lost = 0

    def stored_all(self, blocks: Sequence[StoredBlock], *, tier: CacheTier, adapter: str = "") -> None:
        """See ``BlockSink``."""
        if not self._loses():
            self._sink.stored_all(blocks, tier=tier, adapter=adapter)

    def removed_all(self, blocks: Sequence[BlockHash], *, tier: CacheTier) -> None:
        """See ``BlockSink``."""
        if not self._loses():
            self._sink.removed_all(blocks, tier=tier)

    def cleared(self) -> None:
        """See ``BlockSink``."""
        if not self._loses():
            self._sink.cleared()

    def _loses(self) -> bool:
        lost = self._rng.random() < self._share
        self.lost += lost
        return lost
