"""Memory of request bodies and of tokenizing them: the total, and the share of each tenant.

While a body is read each of its bytes counts ``TIMES`` times: the body, the texts that are parsed of it (one emoji in a
text widens each of its characters to four bytes), and copies of those on their way to blocks. Afterwards what is kept
of it counts once. Objects beside them are bounded for each request (``requests.shape``). What a thread takes to
tokenize counts until its work has ended, also after its client has left.

A tenant may hold as much as is still free, the rule of shared buffers in switches (Choudhury and Hahne, "Dynamic Queue
Length Thresholds", 1998): one alone gets half of it, two a third each, and whoever comes next always finds room.
"""

from collections.abc import Callable
from typing import Final

from gateway.errors import RateLimitedError
from gateway.types import TenantId

TIMES: Final = 8
TOKENIZING_TIMES: Final = 16
"""What each byte of a body counts more while its prompt is tokenized; with all of its reading measured: 4 to 18."""
SPELLING_TIMES: Final = 40
"""The same where the tokens are spelled out in an answer; measured: 16 to 37."""
_RETRY_AFTER_S: Final = 2


class BodyMemory:
    """Counts bytes; O(1). ``shed`` receives each refused request."""

    def __init__(self, most_bytes: int, *, shed: Callable[[str], None]) -> None:
        self._most_bytes = most_bytes
        self._shed = shed
        self._held: dict[TenantId, int] = {}
        self.held_bytes = 0

    def reserve(self, tenant: TenantId) -> "BodyReservation":
        """Return what one request of a tenant counts its bytes with."""
        return BodyReservation(self, tenant)

    def take(self, tenant: TenantId, size: int) -> None:
        """Count bytes that a tenant's request is about to hold; raises ``RateLimitedError`` where it may not."""
        held = self._held.get(tenant, 0) + size
        if held > self._most_bytes - self.held_bytes:
            self._shed("body_memory")
            raise RateLimitedError(
                f"the gateway is saturated: bodies of requests hold {self.held_bytes} of {self._most_bytes} bytes, and "
                "a tenant may hold as many as are free; try again later",
                code="saturated",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._held[tenant] = held
        self.held_bytes += size

    def charge(self, tenant: TenantId, size: int) -> int:
        """Count bytes that a request takes to go on, up to as many as are free then, and return how many: it goes
        on in any case, and others find room.
        """
        held = self._held.get(tenant, 0)
        size = min(size, max(0, self._most_bytes - self.held_bytes - held) // 2)
        if size:
            self._held[tenant] = held + size
            self.held_bytes += size
        return size

    def give_back(self, tenant: TenantId, size: int) -> None:
        """Count bytes no longer that ``take`` or ``charge`` has counted."""
        if not size:
            return
        self.held_bytes -= size
        left = self._held[tenant] - size
        if left:
            self._held[tenant] = left
        else:
            del self._held[tenant]


class BodyReservation:
    """One request's part."""

    __slots__ = ("_memory", "_size", "_tenant")

    def __init__(self, memory: BodyMemory, tenant: TenantId) -> None:
        self._memory = memory
        self._tenant = tenant
        self._size = 0

    def take(self, size: int) -> None:
        """Count more bytes of a body; raises ``RateLimitedError``."""
        if size:
            size *= TIMES
            self._memory.take(self._tenant, size)
            self._size += size

    def give_back_some(self, size: int) -> None:
        """Count so many bytes of the body no longer."""
        if size:
            size *= TIMES
            self._memory.give_back(self._tenant, size)
            self._size -= size

    def keep(self, size: int) -> None:
        """Count so many bytes from now on, once each: the body has been read. Raises ``RateLimitedError`` where they
        are more than were counted, and don't fit.
        """
        if size > self._size:
            self._memory.take(self._tenant, size - self._size)
        elif size < self._size:
            self._memory.give_back(self._tenant, self._size - size)
        self._size = size

    def give_back(self) -> None:
        """Give all of it back. Idempotent."""
        size, self._size = self._size, 0
        if size:
            self._memory.give_back(self._tenant, size)
