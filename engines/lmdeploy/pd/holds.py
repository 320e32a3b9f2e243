"""Prompts that a prefill instance has computed and keeps for another to fetch: on the engine's thread alone.

LMDeploy keeps the blocks of a request with ``preserve_cache`` until somebody frees its session, for ever if nobody
does; it marks them as evictable meanwhile, so that a fetch could read another request's bytes; and its loop ends when
such a request is cancelled. Here a finished prompt stays in ``TO_BE_MIGRATED``, which nothing evicts, under a lease;
it goes when it was fetched, when its client left before it was finished, or when the lease runs out, and never while
it is being read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engines.lmdeploy.pd.wire import TransferError
from kvcontrol.core.pd import Ticket


class Sessions(Protocol):
    """The engine's sessions, as holds use them, by session id."""

    def is_held(self, session_id: int) -> bool:
        """Whether the prompt is computed and its blocks are kept."""

    def end(self, session_id: int) -> None:
        """Free the session with its blocks."""

    def blocks(self, session_id: int) -> int:
        """How many blocks it has."""


class Timer(Protocol):
    """A timer, as returned by ``call_later``."""

    def cancel(self) -> None:
        """Have it not happen."""


@dataclass(slots=True)
class _Held:
    session_id: int
    readers: int = 0
    timer: Timer | None = None
    ending: bool = False
    fetched: bool = False
    expired: bool = False


@dataclass(slots=True)
class HoldCounts:
    """Totals: how holds ended."""

    handed_over: int = 0
    expired: int = 0
    released: int = 0


class Holds:
    """Every ticket of one engine, from the arrival of its request to the end of its session."""

    def __init__(self, sessions: Sessions, *, lease_s: float) -> None:
        self._sessions = sessions
        self._lease_s = lease_s
        self._by_ticket: dict[Ticket, _Held] = {}
        self._ticket_of: dict[int, Ticket] = {}
        self.counts = HoldCounts()

    def __len__(self) -> int:
        return len(self._by_ticket)

    def expect(self, ticket: Ticket, session_id: int) -> bool:
        """Note a request under its ticket; False, and nothing is noted, when the ticket or the session has one."""
        if ticket in self._by_ticket or session_id in self._ticket_of:
            return False
        self._by_ticket[ticket] = _Held(session_id)
        self._ticket_of[session_id] = ticket
        return True

    def knows(self, session_id: int) -> bool:
        """Whether a session has a ticket and has not ended."""
        return session_id in self._ticket_of

    def is_computed(self, session_id: int) -> bool:
        """Whether a session's prompt is there to be fetched."""
        return self._sessions.is_held(session_id)

    def keep(self, session_id: int, later: Callable[..., Timer]) -> bool:
        """Begin the lease of a request whose client has finished; False if there is nothing to hold.

        ``later`` is the loop's ``call_later``.
        """
        held = self._of_session(session_id)
        if held is None or not self._sessions.is_held(session_id):
            return False
        if held.timer is None:
            held.timer = later(self._lease_s, self._expire, session_id)
        return True

    def waits(self, session_id: int) -> bool:
        """Whether a session's lease has begun: only its fetch or the lease ends it."""
        held = self._of_session(session_id)
        return held is not None and held.timer is not None

    def begin(self, ticket: Ticket) -> int:
        """Return the session to read; it stays until ``end``. Raises ``TransferError``."""
        held = self._by_ticket.get(ticket)
        if held is None or held.ending:
            raise TransferError("refused", "nothing is held under this ticket (any more)")
        if held.readers:
            raise TransferError("refused", "this ticket is being fetched by another")
        if not self._sessions.is_held(held.session_id):
            raise TransferError("refused", "the prompt is not computed yet, or was given up")
        held.readers += 1
        return held.session_id

    def end(self, ticket: Ticket, *, taken: bool) -> None:
        """Record the end of a read; a prompt that was ``taken``, or that ended meanwhile, is freed now."""
        held = self._by_ticket[ticket]
        held.readers -= 1
        if taken:
            held.fetched = True
        if taken or held.ending:
            self._sessions.end(held.session_id)

    def still(self, ticket: Ticket) -> bool:
        """Whether the prompt that is being read is still that of the ticket."""
        held = self._by_ticket.get(ticket)
        return held is not None and not held.ending and self._sessions.is_held(held.session_id)

    def must_wait(self, session_id: int) -> bool:
        """Whether the end of a session has to wait for a reader; then it is ended when that is done."""
        held = self._of_session(session_id)
        if held is None or not held.readers:
            return False
        held.ending = True
        return True

    def gone(self, session_id: int) -> None:
        """Forget a session that has ended."""
        ticket = self._ticket_of.pop(session_id, None)
        if ticket is None:
            return
        held = self._by_ticket.pop(ticket)
        if held.timer is not None:
            held.timer.cancel()
        if held.fetched:
            self.counts.handed_over += 1
        elif not held.expired:
            self.counts.released += 1

    def held(self) -> tuple[int, int]:
        """Return how many prompts are kept now, and their blocks; any thread."""
        kept = [each.session_id for each in list(self._by_ticket.values()) if self._sessions.is_held(each.session_id)]
        return len(kept), sum(self._sessions.blocks(session_id) for session_id in kept)

    def _of_session(self, session_id: int) -> _Held | None:
        ticket = self._ticket_of.get(session_id)
        return None if ticket is None else self._by_ticket[ticket]

    def _expire(self, session_id: int) -> None:
        held = self._of_session(session_id)
        if held is None:
            return
        held.expired = True
        self.counts.expired += 1
        self._sessions.end(session_id)
