"""How many blocks of a tier could be evicted now, in all and of each tenant."""

from kvcontrol.core.integrity import must


class EvictableBlocks:
    """``blocks`` is the sum of ``of_tenant``."""

    __slots__ = ("blocks", "of_tenant")

    def __init__(self) -> None:
        self.blocks = 0
        self.of_tenant: dict[str, int] = {}

    def add(self, tenant: str, blocks: int) -> None:
        """Count so many more blocks of a tenant, fewer where negative."""
        self.of_tenant[tenant] = self.of_tenant.get(tenant, 0) + blocks
        self.blocks += blocks

    def forget(self, tenant: str) -> None:
        """Forget a tenant that has no blocks."""
        self.of_tenant.pop(tenant, None)

    def check(self, blocks: int) -> None:
        """Raise ``AssertionError`` unless so many blocks are counted."""
        must(self.blocks == blocks, f"{self.blocks} blocks count as evictable of {blocks}")
        must(sum(self.of_tenant.values()) == blocks, "tenants' evictable blocks don't add up")
