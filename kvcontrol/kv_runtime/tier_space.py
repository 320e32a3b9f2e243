"""The slots of one tier below HBM, their tenants, and the choice of eviction victims.

Each tenant has a policy of its own, so that a tenant's choice among its blocks can't be seen or swayed by another's;
whose block goes is the quotas' to say. Any policy will do: a head stays as long as the tenant has a tail of it here
(``TailsFirst``).
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Final

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.core.integrity import must
from kvcontrol.kv_policy.eviction import EvictionPolicy, PolicyContext
from kvcontrol.kv_runtime.evictable import EvictableBlocks
from kvcontrol.kv_runtime.prompt import Prompt
from kvcontrol.kv_runtime.quota import Allowance, QuotaManager
from kvcontrol.kv_runtime.resident import Block, Copy
from kvcontrol.kv_runtime.tenant_policies import TenantPolicies
from kvcontrol.kv_runtime.tenant_slots import TenantSlots

_TRIM_BLOCKS: Final = 64
"""A call takes away at most so many blocks more than it needs from a tenant whose burst has shrunk. Where that is not
enough, it gets nothing and takes nothing away."""

_ROUNDS: Final = 3
"""A block that nobody holds must stay where one after it is held: others are then asked for."""


class TierSpace:
    """See the module's text. Not thread-safe. Decisions are O(1) a block, plus O(tenants) where room must be made."""

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        tier: CacheTier,
        *,
        capacity_blocks: int,
        block_bytes: int,
        make_policy: Callable[[], EvictionPolicy],
        quotas: QuotaManager,
        on_free: Callable[[int], None],
    ) -> None:
        self.tier = tier
        self.capacity_blocks = capacity_blocks
        self.block_bytes = block_bytes
        self.slots = TenantSlots(tier, capacity_blocks, quotas, on_free=on_free)
        self.policies = TenantPolicies(tier, make_policy)
        self.evictable = EvictableBlocks()
        """Blocks that nobody holds or keeps."""
        self._quotas = quotas
        self._may_leave = False
        self._kept = 0
        """Blocks here that transfers keep."""
        quotas.open_tier(tier, capacity_blocks=capacity_blocks, block_bytes=block_bytes)

    # Slots.

    def reserve(self, tenant: str, count: int, evict: Callable[[list[BlockId]], None]) -> list[Copy]:
        """Return up to ``count`` slots for a tenant; ``evict`` receives the victims and evicts them.

        Fewer come back when the rest is held, guaranteed to others, or beyond the tenant's burst. A block is evicted
        only if a slot comes back for it: what a transfer uses stays, since its slot would be free too late.
        """
        allowance = self._quotas.may_use(tenant, self.tier, count)
        wanted = self._make_way(tenant, allowance, evict)
        if allowance.reason:
            self._quotas.count_over_burst(tenant, self.tier, count - allowance.blocks + allowance.own_first)
        spent: set[str] = set()
        for _ in range(_ROUNDS):
            short = wanted - self.slots.available
            if short <= 0 or not self.evictable.blocks:
                break
            evictable = {name: free for name, free in self.evictable.of_tenant.items() if name not in spent}
            for donor, blocks in self._quotas.donors(tenant, self.tier, short, evictable):
                victims = self.victims(donor, blocks)
                evict(victims)
                if len(victims) < blocks:
                    spent.add(donor)
        return self.slots.allocate(tenant, min(wanted, self.slots.available))

    def _make_way(self, tenant: str, allowance: Allowance, evict: Callable[[list[BlockId]], None]) -> int:
        """Evict a tenant's own blocks beyond its burst, and return how many new blocks fit then.

        Nothing goes where nothing could come: beyond a burst that has shrunk, what is too much is trimmed elsewhere.
        """
        first = allowance.own_first
        if not first:
            return allowance.blocks
        too_much = first - allowance.blocks
        if too_much > _TRIM_BLOCKS or too_much >= self.evictable.of_tenant.get(tenant, 0):
            return 0
        victims = self.victims(tenant, first)
        evict(victims)
        return max(0, allowance.blocks - (first - len(victims)))

    # Blocks, in paths: see ``EvictionPolicy``.

    def requested(self, prompt: Prompt, found: Sequence[Block]) -> None:
        """Follow a prompt that came, and the use of its leading blocks that lie below HBM, of which some are here."""
        policy = self.policies.get(prompt.tenant)
        if policy is not None:
            policy.requested(prompt.keys, block_tokens=prompt.block_tokens, prompt_tokens=prompt.prompt_tokens)
        tier = self.tier
        here = [block for block in found if (copy := block.copies.get(tier)) is not None and not copy.leaving]
        self.access(here)

    def insert(self, path: Sequence[Block]) -> None:
        """Follow blocks that gained a copy here; held blocks stay held."""
        for tenant, blocks in _by_tenant(path):
            self._admit(tenant, blocks)
            held = [block for block in blocks if block.holds]
            if held:
                self._hold(tenant, held)

    def access(self, path: Sequence[Block]) -> None:
        """Follow a use of blocks that have a copy here and aren't leaving."""
        for tenant, blocks in _by_tenant(path):
            self.policies.of(tenant).access([block.block_id for block in blocks])

    def hold(self, path: Sequence[Block]) -> None:
        """Follow blocks with a copy here that became held; one that was leaving stays."""
        tier = self.tier
        for tenant, blocks in _by_tenant(path):
            leaving = [block for block in blocks if block.copies[tier].leaving] if self._may_leave else ()
            if leaving:
                self._admit(tenant, leaving)
                for block in leaving:
                    block.copies[tier].leaving = False
            self._hold(tenant, blocks)

    def release(self, path: Sequence[Block]) -> None:
        """Follow blocks with a copy here that are no longer held."""
        for tenant, blocks in _by_tenant(path):
            self.policies.of(tenant).release([block.block_id for block in blocks])
            self.evictable.add(tenant, self._unkept(blocks))

    def keep(self, block: Block) -> None:
        """Follow a block whose slot here is in a transfer: it is no victim until ``let_go``."""
        tenant = block.record.tenant
        self.policies.made(tenant).keep(block.record.key)
        self._kept += 1
        if not block.holds and not block.copies[self.tier].leaving:
            self.evictable.add(tenant, -1)

    def let_go(self, block: Block) -> None:
        """Follow a block whose slot here is in no transfer any more, also if it has just lost it."""
        tenant = block.record.tenant
        self.policies.of(tenant).let_go(block.record.key)
        self._kept -= 1
        copy = block.copies.get(self.tier)
        if copy is not None and not block.holds and not copy.leaving:
            self.evictable.add(tenant, 1)
        self._forget(tenant)

    def stay(self, block: Block) -> None:
        """Follow a block that ``leave`` named, that is not held and stays: counts as used now."""
        copy = block.copies[self.tier]
        self._admit(block.record.tenant, [block])
        copy.leaving = False

    def leave(self, block: Block) -> None:
        """Follow a victim that leaves only when it is written below."""
        block.copies[self.tier].leaving = True
        self._may_leave = True

    def remove(self, block: Block) -> None:
        """Follow a block whose copy leaves without having been chosen by this tier."""
        if block.copies[self.tier].leaving:
            return
        tenant = block.record.tenant
        self.policies.of(tenant).remove((block.block_id,))
        if not block.holds and not block.copies[self.tier].keeps:
            self.evictable.add(tenant, -1)
        self._forget(tenant)

    def victims(self, tenant: str, count: int) -> list[BlockId]:
        """Return the blocks of a tenant that go next, which its policy forgets."""
        policy = self.policies.get(tenant)
        if policy is None or count <= 0:
            return []
        context = PolicyContext(
            tier=self.tier,
            wanted_blocks=count,
            used_blocks=self.slots.used,
            capacity_blocks=self.capacity_blocks,
        )
        victims = list(policy.select_victims(context).victims)
        self.evictable.add(tenant, -len(victims))
        self._forget(tenant)
        return victims

    def end_swap(self, blocks: Iterable[Block]) -> None:
        """Activate the successors with ``blocks``, all blocks of this tier. O(blocks).

        The old ones stay in charge when anything raises.
        """
        held: dict[str, list[BlockId]] = {}
        for block in blocks:
            if block.holds and not block.copies[self.tier].leaving:
                held.setdefault(block.record.tenant, []).append(block.block_id)
        self.policies.end_swap(held)

    def check_integrity(self, blocks: Sequence[Block]) -> None:
        """Raise ``AssertionError`` unless policies, slots and the given blocks of this tier agree. O(blocks)."""
        self.slots.check_integrity()
        self.policies.check_integrity()
        slots = [block.copies[self.tier].slot for block in blocks]
        must(len(set(slots)) == len(slots), f"{self.tier}: a slot has two owners")
        must(all(slot in self.slots for slot in slots), f"{self.tier}: a block's slot is free")
        known = len(self.policies)
        staying = sum(not block.copies[self.tier].leaving for block in blocks)
        must(known == staying, f"{self.tier}: policies know {known} blocks of {staying}")
        free = sum(not block.holds and not _stays(block.copies[self.tier]) for block in blocks)
        self.evictable.check(free)

    def _admit(self, tenant: str, blocks: Sequence[Block]) -> None:
        records = [block.record for block in blocks]
        self.policies.made(tenant).insert(
            [block.block_id for block in blocks],
            [record.key for record in records],
            [record.parent for record in records],
        )
        self.evictable.add(tenant, self._unkept(blocks))

    def _hold(self, tenant: str, blocks: Sequence[Block]) -> None:
        self.policies.of(tenant).hold([block.block_id for block in blocks])
        self.evictable.add(tenant, -self._unkept(blocks))

    def _unkept(self, blocks: Sequence[Block]) -> int:
        """Return how many of some blocks here no transfer keeps."""
        tier = self.tier
        return sum(not block.copies[tier].keeps for block in blocks) if self._kept else len(blocks)

    def _forget(self, tenant: str) -> None:
        """Let go of the policy of a tenant that has nothing left here: tenants come and go."""
        if self.policies.forget(tenant):
            self.evictable.forget(tenant)


def _stays(copy: Copy) -> bool:
    """Whether a copy is protected although nothing holds its block."""
    return copy.leaving or bool(copy.keeps)


def _by_tenant(path: Sequence[Block]) -> Sequence[tuple[str, Sequence[Block]]]:
    if len({block.record.tenant for block in path}) == 1:  # as nearly always
        return ((path[0].record.tenant, path),)
    return [(tenant, list(blocks)) for tenant, blocks in groupby(path, key=lambda block: block.record.tenant)]
