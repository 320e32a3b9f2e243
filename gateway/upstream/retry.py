"""Whether a failed request may be tried on another instance.

Only before its first byte has gone to the client, and only when the instance did not take it: no connection, a
connection that ended before any answer, something that is no answer, a redirection, an instance that hangs, or a
502/503 from it. Never after a 4xx, 429 or 500:
those would come again and only multiply the load. A budget bounds the share of retries, so that an outage is not made
worse.
"""

from collections.abc import Callable
from http import HTTPStatus

from gateway.upstream.failure import FailureKind

_KINDS = frozenset(
    {
        FailureKind.CONNECT,
        FailureKind.CONNECT_TIMEOUT,
        FailureKind.NO_ANSWER,
        FailureKind.NO_HTTP,
        FailureKind.REDIRECTED,
        FailureKind.HUNG,
    }
)
_STATUSES = frozenset({int(HTTPStatus.BAD_GATEWAY), int(HTTPStatus.SERVICE_UNAVAILABLE)})
_MOST_LOST = 1
"""A request that two instances died or hung under is given up: it may be what does that to them."""

_BURST = 100.0


class RetryBudget:
    """A bucket of retries: each request adds ``ratio``, each retry takes one; it starts full and holds a
    hundred, enough for all that an instance may be working on when it dies.
    """

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


class Attempts:
    """One request's tries: ``begin`` each, then ask whether there may be another ``again``."""

    def __init__(self, budget: RetryBudget, *, most: int) -> None:
        budget.request()
        self._budget = budget
        self._left = most
        self._lost = 0
        self._others: Callable[[], int] = int

    def begin(self, *, others: Callable[[], int]) -> None:
        """Start a try; ``others`` says, once it has failed, how many instances are there that have not been tried."""
        self._left -= 1
        self._others = others

    def again(self, ended: FailureKind | int) -> bool:
        """Whether a try that ended with this failure or status is to be followed by one on another instance.

        True takes one retry from the budget.
        """
        if ended not in _KINDS and ended not in _STATUSES:
            return False
        self._lost += ended in {FailureKind.NO_ANSWER, FailureKind.NO_HTTP, FailureKind.HUNG}
        return self._lost <= _MOST_LOST and self._left > 0 and self._others() > 0 and self._budget.take()
