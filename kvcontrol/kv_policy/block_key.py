"""A content key that says more of its block than what it holds: whose it is, how important, what its loss costs.

Policies that ask for nothing more take it for the bare key: it is equal to it, and has its hash. So who inserts blocks
may describe them whatever the policy is, and ghosts know them again however they were described before.
"""

import math

from kvcontrol.core.shown import shown
from kvcontrol.kv_policy.allowed import PolicyError, check_number, is_whole
from kvcontrol.kv_policy.eviction import ContentKey

HIGHEST_PRIORITY = 7


class BlockKey:
    """``recompute_s`` and ``reload_s`` are what getting the block back costs, None where that isn't known or can't be.

    ``priority`` is 0 (the least) to ``HIGHEST_PRIORITY``. ``ValueError`` for an invalid value.
    """

    __slots__ = ("content", "priority", "recompute_s", "reload_s", "tenant")

    def __init__(
        self,
        content: ContentKey,
        *,
        tenant: str = "",
        priority: int = 0,
        recompute_s: float | None = None,
        reload_s: float | None = None,
    ) -> None:
        if not ((type(priority) is int or is_whole(priority)) and 0 <= priority <= HIGHEST_PRIORITY):
            raise PolicyError(f"priority {shown(priority)}; allowed is 0 to {HIGHEST_PRIORITY}, a whole number")
        if type(tenant) is not str:
            _check_text("tenant", tenant)
        for name, seconds in (("recompute_s", recompute_s), ("reload_s", reload_s)):
            if seconds is not None and not (type(seconds) is float and 0 <= seconds < math.inf):
                check_number(name, seconds)
        self.content = content
        self.tenant = tenant
        self.priority = priority
        self.recompute_s = recompute_s
        self.reload_s = reload_s

    @property
    def loss_s(self) -> float | None:
        """Return the cost of losing the block if it is used again: the cheaper known way to restore it."""
        known = [seconds for seconds in (self.recompute_s, self.reload_s) if seconds is not None]
        return min(known) if known else None

    def __eq__(self, other: object) -> bool:
        return self.content == (other.content if isinstance(other, BlockKey) else other)

    def __hash__(self) -> int:
        return hash(self.content)

    def __repr__(self) -> str:
        return f"BlockKey({self.content!r}, tenant={self.tenant!r}, priority={self.priority})"


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise PolicyError(f"{name} is {shown(value)}; allowed is a text")


def described(key: ContentKey | None) -> BlockKey:
    """Return a key as a described one: of no tenant, with the least priority and unknown costs where it isn't one."""
    return key if isinstance(key, BlockKey) else BlockKey(key)
