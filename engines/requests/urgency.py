"""How urgent a request is, which its headers contain.

Time goes as a duration, as the clocks of two machines differ: it runs from the moment at which the engine process
takes the request in, a few milliseconds after the gateway sent it.
"""

from dataclasses import dataclass
from typing import Final

from engines.requests.headers import HeaderError, Headers, HeaderValue, single
from kvcontrol.core.control import DEADLINE_HEADER, PRIORITY_HEADER
from kvcontrol.core.priority import Priority

_MOST_MS: Final = 86_400_000
_PRIORITIES: Final = {each.value.encode(): each for each in Priority}


@dataclass(frozen=True, slots=True, kw_only=True)
class Urgency:
    """``first_token_s`` is in how long the first token is due; None: whenever."""

    priority: Priority = Priority.NORMAL
    first_token_s: float | None = None


ORDINARY: Final = Urgency()


class UrgencyError(HeaderError):
    """A header that says how urgent a request is, and isn't what is allowed."""

    code = "invalid_urgency"


def urgency_of_headers(headers: Headers) -> Urgency:
    """Return what the headers say; raises ``UrgencyError``."""
    priority = single(headers, PRIORITY_HEADER, UrgencyError)
    due = single(headers, DEADLINE_HEADER, UrgencyError)
    if priority is None and due is None:
        return ORDINARY
    if priority is not None and priority not in _PRIORITIES:
        raise UrgencyError(PRIORITY_HEADER, f"is none of {', '.join(Priority)}")
    if due is not None and not (due.isdigit() and len(due) <= len(str(_MOST_MS)) and int(due) <= _MOST_MS):
        raise UrgencyError(DEADLINE_HEADER, f"is not a whole number of milliseconds from 0 to {_MOST_MS}")
    return Urgency(
        priority=Priority.NORMAL if priority is None else _PRIORITIES[priority],
        first_token_s=None if due is None else int(due) / 1000,
    )


URGENCY: Final = HeaderValue("kvgate_urgency", absent=ORDINARY, read=urgency_of_headers)
