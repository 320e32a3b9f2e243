"""Backoff between restarts of an event feed."""

from enum import StrEnum

_FIRST_S = 0.2
_LONGEST_S = 5.0
_LONGEST_AFTER_FAULT_S = 60.0


class Reason(StrEnum):
    """Why what is known of an instance can't be trusted any more."""

    BAD_ENDPOINT = "bad_endpoint"
    BEHIND = "behind"
    CONNECTION_LOST = "connection_lost"
    CONTRADICTED = "contradicted"
    EVENTS_DROPPED = "events_dropped"
    GAP = "gap"
    INSTANCE_AWAY = "instance_away"
    NEW_ENDPOINT = "new_endpoint"
    NEW_EPOCH = "new_epoch"
    REPLAY_FAILED = "replay_failed"
    SEQUENCE_RESTARTED = "sequence_restarted"
    SNAPSHOT_FAILED = "snapshot_failed"
    SNAPSHOT_INVALID = "snapshot_invalid"
    UNDECODABLE = "undecodable"


_LIFE = {
    Reason.CONNECTION_LOST,
    Reason.EVENTS_DROPPED,
    Reason.INSTANCE_AWAY,
    Reason.NEW_ENDPOINT,
    Reason.NEW_EPOCH,
    Reason.SNAPSHOT_FAILED,
}
"""What instances bring with them that come, go and work hard. The rest is what a peer with a fault says: that may go on
for ever, and each start costs it and us a snapshot."""


class Backoff:
    """Pauses that double with each start that didn't last: up to 5 s, and up to a minute where the peer is at fault."""

    def __init__(self) -> None:
        self._next_s = _FIRST_S

    def pause_s(self, reason: Reason, lasted_s: float) -> float:
        """Return how long to wait after a session that lasted ``lasted_s`` and ended for ``reason``."""
        longest_s = _LONGEST_S if reason in _LIFE else _LONGEST_AFTER_FAULT_S
        if lasted_s > longest_s:
            self._next_s = _FIRST_S
        pause_s = min(self._next_s, longest_s)
        self._next_s = min(self._next_s * 2, _LONGEST_AFTER_FAULT_S)
        return pause_s
