"""A resident block: its record, and its copies in the tiers below HBM."""

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_runtime.record import BlockRecord


class Copy:
    """A slot of one tier that holds a block's bytes or waits for them.

    ``pins`` transfers use it: as long as there are any, the slot is not given to anybody else, also when the copy is
    no longer wanted (``doomed``); it is erased before, where that is wanted. ``keeps`` of them need the copy to stay
    and don't hold its block: it is no policy's victim, as its slot would be free only later. ``leaving``: a policy has
    chosen it, and it goes once it is written below.
    """

    __slots__ = ("doomed", "erase", "keeps", "leaving", "pins", "slot", "tenant", "tier")

    def __init__(self, tier: CacheTier, slot: int, tenant: str) -> None:
        self.tier = tier
        self.slot = slot
        self.tenant = tenant
        self.pins = 0
        self.keeps = 0
        self.doomed = False
        self.erase = False
        self.leaving = False


class Block:
    """``copies`` can be read; ``arriving`` transfers will add a copy.

    ``holds`` counts tickets and callers; a held block is no policy's victim. ``claims`` are those of callers alone.
    ``stalled``: a transfer of it was given
    up and has not come back. ``dropped``: nobody may find it again, whatever still arrives.
    """

    __slots__ = (
        "arriving",
        "block_id",
        "checksum",
        "claims",
        "copies",
        "dropped",
        "holds",
        "last_access_s",
        "record",
        "stalled",
        "used_again",
    )

    def __init__(self, block_id: BlockId, record: BlockRecord, now_s: float) -> None:
        self.block_id = block_id
        self.record = record
        self.checksum: int | None = None
        self.copies: dict[CacheTier, Copy] = {}
        self.arriving = 0
        self.holds = 0
        self.claims = 0
        self.stalled = 0
        self.dropped = False
        self.used_again = False
        self.last_access_s = now_s

    @property
    def readable(self) -> bool:
        """Whether its bytes can be had now, as far as is known."""
        return not self.dropped and (CacheTier.DDR in self.copies or (bool(self.copies) and not self.stalled))

    @property
    def gone(self) -> bool:
        """Whether nothing is left of it and nothing comes."""
        return not self.copies and not self.arriving
