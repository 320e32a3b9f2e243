"""The look-up interface of a prefix index, and its result."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcontrol.core import BlockHash, CacheTier, InstanceId, KvEvent
from kvcontrol.core.control import Residents


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """How much of one prompt an instance holds.

    ``blocks`` is the longest leading run held in any tier; ``by_tier`` says how many of those blocks have that tier as
    their fastest copy (tiers with none are left out, the values add up to ``blocks``).
    """

    blocks: int
    by_tier: Mapping[CacheTier, int]


class ResidencyIndex(Protocol):
    """Which instance holds which blocks in which tier. Soft state: rebuilt from snapshots, kept true by events."""

    def reset(self, instance: InstanceId, residents: Residents) -> None:
        """Replace everything that is known of an instance."""

    def extend(
        self, instance: InstanceId, tier: CacheTier, blocks: Iterable[tuple[BlockHash, BlockHash | None]]
    ) -> None:
        """Add blocks with their parents, parents first: all slices of a snapshot after ``reset`` to nothing make up
        that snapshot, and after each the instance is known to hold less.
        """

    def apply(self, instance: InstanceId, event: KvEvent) -> None:
        """Follow one event. Storing a held block and removing an unknown one change nothing."""

    def drop(self, instance: InstanceId) -> None:
        """Forget an instance; one that isn't known is no error."""

    def match(self, hashes: Sequence[BlockHash]) -> Mapping[InstanceId, PrefixMatch]:
        """Return the instances that hold at least the first of a prompt's chained ``hashes``.

        Changes nothing that can be asked for; the answer is valid until the index changes.
        """

    def blocks_held(self, instance: InstanceId) -> Mapping[CacheTier, int]:
        """Return the number of blocks in each tier; empty for an unknown instance."""
