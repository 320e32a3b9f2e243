"""Headers of urgency for engines: the request's class, and the deadline of its first token."""

from typing import Final

from gateway.http.headers import Header
from kvcontrol.core.control import DEADLINE_HEADER, PRIORITY_HEADER
from kvcontrol.core.priority import Priority

_PRIORITY: Final = PRIORITY_HEADER.encode()
_DEADLINE: Final = DEADLINE_HEADER.encode()


def urgency_headers(priority: Priority, *, due_in_s: float) -> tuple[Header, Header]:
    """Return the headers of an attempt that is made now; what is overdue is due at once."""
    due_ms = max(0, round(due_in_s * 1000))
    return (_PRIORITY, priority.value.encode()), (_DEADLINE, str(due_ms).encode())
