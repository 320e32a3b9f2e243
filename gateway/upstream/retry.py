"""Whether a failed request may be tried on another instance.

Only before its first byte has gone to the client, and only when the instance did not take it: no connection, a
connection that ended before any answer, an instance that hangs, or a 502/503 from it. Never after a 4xx, 429 or 500:
those would come again and only multiply the load. A budget bounds the share of retries, so that an outage is not made
worse.
"""

from http import HTTPStatus

from gateway.upstream.client import FailureKind

RETRIABLE_KINDS = frozenset({FailureKind.CONNECT, FailureKind.CONNECT_TIMEOUT, FailureKind.NO_ANSWER, FailureKind.HUNG})
RETRIABLE_STATUSES = frozenset({int(HTTPStatus.BAD_GATEWAY), int(HTTPStatus.SERVICE_UNAVAILABLE)})
MAX_INSTANCES_LOST = 1
"""A request that two instances died under is given up: it may be what kills them."""

_BURST = 10.0


class RetryBudget:
    """A bucket of retries: each request adds ``ratio``, each retry takes one; it starts full and holds ten."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._left = _BURST if ratio else 0.0

    def request(self) -> None:
        self._left = min(_BURST, self._left + self._ratio)

    def take(self) -> bool:
        """Take one retry; False when there is none left."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


__all__ = ["RETRIABLE_KINDS", "RETRIABLE_STATUSES", "RetryBudget"]
