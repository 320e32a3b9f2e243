"""Tickets from opening to end: deadlines, cancellations, and reports of ended tickets."""

import heapq
import math
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Final

from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_policy.cost_benefit import CostBenefitModel, Quantity
from kvcontrol.kv_runtime.backend_protocol import BlockStatus, Fence
from kvcontrol.kv_runtime.flights import Flights
from kvcontrol.kv_runtime.loader import Loader
from kvcontrol.kv_runtime.residency import Residency
from kvcontrol.kv_runtime.ticket import MOVED, REASON_OF, Finished, Reason, Ticket, TicketId, TicketKind

_DDR: Final = CacheTier.DDR


class TicketBook:
    """All open tickets, and ended ones that were not reported yet. Not thread-safe; O(1) a block."""

    def __init__(
        self,
        residency: Residency,
        flights: Flights,
        loader: Loader,
        *,
        costs: CostBenefitModel,
        clock: Callable[[], float],
    ) -> None:
        self.outcomes: Counter[tuple[TicketKind, BlockStatus, Reason]] = Counter()
        """How blocks ended, since the start."""
        self._residency = residency
        self._flights = flights
        self._loader = loader
        self._costs = costs
        self._clock = clock
        self._ids = count()
        self._open: dict[TicketId, Ticket] = {}
        self._deadlines: list[tuple[float, TicketId]] = []
        self._finished: list[Finished] = []

    def __len__(self) -> int:
        return len(self._open)

    def get(self, ticket_id: TicketId) -> Ticket | None:
        """Return a ticket that has not ended."""
        return self._open.get(ticket_id)

    def open(self, kind: TicketKind, size: int, deadline_s: float, fence: Fence | None = None) -> Ticket:
        """Return a ticket for ``size`` blocks that ends within ``deadline_s``. ``ValueError`` unless that is > 0."""
        if not deadline_s > 0:
            raise ValueError(f"deadline_s is {deadline_s}; it must be > 0")
        now_s = self._clock()
        until_s = now_s + deadline_s
        ticket = Ticket(TicketId(next(self._ids)), kind, size, deadline_s=until_s, fence=fence)
        ticket.opened_s = now_s
        self._open[ticket.ticket_id] = ticket
        if until_s < math.inf:
            heapq.heappush(self._deadlines, (until_s, ticket.ticket_id))
        return ticket

    def settle(self, ticket: Ticket) -> None:
        """Let go of a ticket's blocks once all of them have ended."""
        if ticket.open or self._open.pop(ticket.ticket_id, None) is None:
            return
        held = list(ticket.held.values())
        self._residency.release(held)
        if ticket.kind is TicketKind.SAVE and held and not ticket.heads_held:
            self._residency.touch_before(held[0], _DDR)
        ticket.held.clear()
        finished = ticket.finished()
        moved = finished.ends.count(MOVED)
        if moved:
            self.outcomes[ticket.kind, MOVED.status, MOVED.reason] += moved
        if ticket.expected_s is not None and moved == len(finished.ends):
            took_s = self._clock() - ticket.opened_s
            self._costs.came(Quantity.LOAD, predicted_s=ticket.expected_s, actual_s=took_s)
        if moved < len(finished.ends):
            self.outcomes.update([(ticket.kind, *end) for end in finished.ends if end != MOVED])
        self._finished.append(finished)

    def give_up(self, ticket: Ticket, status: BlockStatus) -> None:
        """End a ticket with ``status`` as soon as that is safe."""
        self._loader.give_up(ticket, status, REASON_OF[status])
        self._flights.give_up(ticket, status)
        self.settle(ticket)

    def expire(self) -> None:
        """Cancel tickets whose deadline has passed. O(log tickets) for each."""
        now_s = self._clock()
        while self._deadlines and (self._deadlines[0][0] <= now_s or self._deadlines[0][1] not in self._open):
            _, ticket_id = heapq.heappop(self._deadlines)
            if (late := self._open.get(ticket_id)) is not None:
                self.give_up(late, BlockStatus.LATE)

    def end_all(self, status: BlockStatus) -> None:
        """Give up every ticket."""
        for ticket in list(self._open.values()):
            self.give_up(ticket, status)

    def take_finished(self) -> tuple[Finished, ...]:
        """Return the tickets that ended since the last call."""
        finished = tuple(self._finished)
        self._finished.clear()
        return finished
