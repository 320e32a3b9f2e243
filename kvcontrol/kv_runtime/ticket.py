"""Requests to the hierarchy and their results: values for callers, and the ticket behind them."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple, NewType

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_runtime.backend_protocol import BlockStatus, Fence
from kvcontrol.kv_runtime.plan import PlanId, PlanRefusal
from kvcontrol.kv_runtime.record import BlockRecord
from kvcontrol.kv_runtime.resident import Block

TicketId = NewType("TicketId", int)
"""A save, load or prefetch as one hierarchy numbers it; never used twice."""


class TicketKind(StrEnum):
    """Kind of request that a ticket stands for."""

    SAVE = "save"
    LOAD = "load"
    PREFETCH = "prefetch"
    DEMOTE = "demote"


class Reason(StrEnum):
    """Why a block ended as it did."""

    MOVED = "moved"
    RESIDENT = "resident"
    """It was there already; nothing was copied."""
    IN_FLIGHT = "in_flight"
    """An earlier save of the same block has not ended; this one adds nothing."""
    COLLISION = "collision"
    """Another block has the same key and other tokens, or this one comes after such a one in its path."""
    NOT_RESIDENT = "not_resident"
    """It isn't in any tier (any more)."""
    NO_SPACE = "no_room"
    """No slot could be had: what is there is held, guaranteed to others, or the tenant's burst is reached."""
    NOT_WORTH = "not_worth"
    """Keeping it is expected to cost more than it saves (``MigrationMode.WORTHWHILE``)."""
    QUEUE_FULL = "queue_full"
    STALLED = "stalled"
    """Its device doesn't answer."""
    CLOSED = "closed"
    DEVICE = "device"
    """A device refused or broke off."""
    CORRUPT = "corrupt"
    DEVICE_FULL = "device_full"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"


REASON_OF: Final = {
    BlockStatus.OK: Reason.MOVED,
    BlockStatus.FAILED: Reason.DEVICE,
    BlockStatus.CORRUPT: Reason.CORRUPT,
    BlockStatus.NO_SPACE: Reason.DEVICE_FULL,
    BlockStatus.CANCELLED: Reason.CANCELLED,
    BlockStatus.LATE: Reason.DEADLINE,
}
REASON_OF_REFUSAL: Final = {
    PlanRefusal.QUEUE_FULL: Reason.QUEUE_FULL,
    PlanRefusal.STALLED: Reason.STALLED,
    PlanRefusal.CLOSED: Reason.CLOSED,
}


class Outcome(NamedTuple):
    """One block's end. Only with ``OK`` are its bytes where they were wanted; ``block_id`` None: it never got one."""

    block_id: BlockId | None
    status: BlockStatus
    reason: Reason


class End(NamedTuple):
    """How a block ended, and why; blocks that ended alike share one."""

    status: BlockStatus
    reason: Reason


MOVED: Final = End(BlockStatus.OK, Reason.MOVED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A ticket's end: ``block_ids`` and ``ends`` in the order in which blocks were named."""

    ticket_id: TicketId
    kind: TicketKind
    block_ids: Sequence[BlockId | None]
    ends: Sequence[End]

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """Outcome of each block, computed at every call. O(blocks)."""
        return tuple([Outcome(block_id, *end) for block_id, end in zip(self.block_ids, self.ends, strict=True)])

    @property
    def failed(self) -> list[int]:
        """Places of blocks that are not where they were wanted."""
        ends = self.ends
        if ends.count(MOVED) == len(ends):
            return []
        return [place for place, end in enumerate(ends) if end.status is not BlockStatus.OK]

    @property
    def leading_ok(self) -> int:
        """How many blocks from the first on are where they were wanted, without a gap."""
        return next(iter(self.failed), len(self.ends))


class Change(NamedTuple):
    """A block became readable in a tier, or ceased to be."""

    block_id: BlockId
    tier: CacheTier
    gained: bool
    record: BlockRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Events since the last poll; ``changes`` in order.

    ``queued`` are loads that have not finished, but whose blocks are all verified and on their way: an engine that
    joins them on its device (``OrderedBackendProtocol.join``) need not wait for the end.
    """

    finished: tuple[Finished, ...]
    changes: tuple[Change, ...]
    queued: tuple[TicketId, ...] = ()


class SaveRequest(NamedTuple):
    """A block to keep, and the engine's slot in which it lies."""

    record: BlockRecord
    engine_slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTicket:
    """``block_ids``: the new id of each block, None if it was refused (the ticket's end has the reason)."""

    ticket_id: TicketId
    block_ids: tuple[BlockId | None, ...]


class Ticket:
    """An open ticket: its pending blocks, and the holds to release at its end."""

    __slots__ = (
        "blocks",
        "deadline_s",
        "ends",
        "expected_s",
        "fence",
        "heads_held",
        "held",
        "kind",
        "open",
        "opened_s",
        "pending",
        "plans",
        "queued",
        "repeats",
        "slots",
        "ticket_id",
    )

    def __init__(
        self, ticket_id: TicketId, kind: TicketKind, size: int, *, deadline_s: float, fence: Fence | None = None
    ) -> None:
        self.ticket_id = ticket_id
        self.kind = kind
        self.deadline_s = deadline_s
        self.fence = fence
        self.expected_s: float | None = None
        """How long it was said to take."""
        self.opened_s = 0.0
        self.open = size
        self.ends: list[End | None] = [None] * size
        self.blocks: list[Block | None] = [None] * size
        self.slots: list[int] = [0] * size
        """The engine's slots of a load."""
        self.held: dict[BlockId, Block] = {}
        self.repeats = False
        """Whether a load or prefetch may name a block more than once: it holds fewer than it names."""
        self.heads_held = False
        """The caller of a save keeps what comes before its blocks."""
        self.plans: set[PlanId] = set()
        self.queued = 0
        """How many blocks of a load the engine can count on once it has joined what is queued on its device."""
        self.pending: deque[int] = deque()
        """Places of blocks that wait for a slot in DDR."""

    def end(self, place: int, status: BlockStatus, reason: Reason) -> None:
        """Record the outcome of the block at ``place``; the first outcome stands."""
        if self.ends[place] is None:
            self.ends[place] = MOVED if reason is MOVED.reason else End(status, reason)
            self.open -= 1

    def moved(self, places: Iterable[int]) -> None:
        """Record blocks as moved; earlier outcomes stand."""
        ends = self.ends
        for place in places:
            if ends[place] is None:
                ends[place] = MOVED
                self.open -= 1

    def end_all(self, status: BlockStatus, reason: Reason) -> None:
        """End every block that has not ended."""
        for place in range(len(self.ends)):
            self.end(place, status, reason)

    def finished(self) -> Finished:
        """Return the result; only once all blocks have an outcome."""
        return Finished(
            ticket_id=self.ticket_id,
            kind=self.kind,
            block_ids=[None if block is None else block.block_id for block in self.blocks],
            ends=[end for end in self.ends if end is not None],
        )
