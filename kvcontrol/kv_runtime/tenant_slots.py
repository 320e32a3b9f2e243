"""The slots of one tier, each charged to the account of the tenant that has it."""

from collections.abc import Callable

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.integrity import must
from kvcontrol.kv_runtime.quota import QuotaManager
from kvcontrol.kv_runtime.refusal import NoSpace
from kvcontrol.kv_runtime.resident import Copy
from kvcontrol.kv_runtime.slab import SlabAllocator


class TenantSlots:
    """Slots and accounts agree always. Not thread-safe."""

    def __init__(
        self, tier: CacheTier, capacity_blocks: int, quotas: QuotaManager, *, on_free: Callable[[int], None]
    ) -> None:
        self._tier = tier
        self._slots = SlabAllocator(capacity_blocks)
        self._quotas = quotas
        self._on_free = on_free

    def __contains__(self, slot: int) -> bool:
        return slot in self._slots

    @property
    def used(self) -> int:
        """Slots that are handed out."""
        return self._slots.used

    @property
    def available(self) -> int:
        """Slots that are free."""
        return self._slots.available

    def allocate(self, tenant: str, count: int) -> list[Copy]:
        """Return so many free slots for a tenant; there must be as many."""
        slots = self._slots.allocate(count)
        if isinstance(slots, NoSpace):
            raise TypeError(f"{self._tier}: {slots.available} slots are free and {slots.wanted} can't be had")
        if slots:
            self._quotas.charge(tenant, self._tier, len(slots))
        return [Copy(self._tier, slot, tenant) for slot in slots]

    def claim(self, slot: int, tenant: str) -> Copy:
        """Return one given slot for a block that a restart found in it."""
        self._slots.take(slot)
        self._quotas.charge(tenant, self._tier, 1)
        return Copy(self._tier, slot, tenant)

    def free(self, copy: Copy) -> None:
        """Free a slot that no transfer and no policy uses; ``on_free`` receives it."""
        self._on_free(copy.slot)
        self._slots.free((copy.slot,))
        self._quotas.refund(copy.tenant, self._tier, 1)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless slots and accounts agree. O(slots)."""
        self._slots.check_integrity()
        used = sum(usage.used_blocks for usage in self._quotas.usage(self._tier).values())
        must(used == self.used, f"{self._tier}: accounts contain {used} slots, {self.used} are used")
