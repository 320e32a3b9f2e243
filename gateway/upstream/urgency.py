"""How urgent a request is, as an engine is told: its tenant's class, and in how long its first token is due."""

from gateway.limits import TenantLimits
from kvcontrol.core.control import DEADLINE_HEADER, PRIORITY_HEADER


def urgency_headers(limits: TenantLimits, *, due_in_s: float) -> list[tuple[str, str]]:
    """Return the headers of an attempt that is made now; what is overdue is due at once."""
    return [(PRIORITY_HEADER, limits.priority.value), (DEADLINE_HEADER, str(max(0, round(due_in_s * 1000))))]


__all__ = ["urgency_headers"]
