"""The eviction policies of one tier, one a tenant, and their swap for others."""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy.eviction import EvictionPolicy
from kvcontrol.kv_policy.tails_first import TailsFirst


class TenantPolicies:
    """Policies of one kind, except for those that a swap is being prepared with. Not thread-safe."""

    def __init__(self, tier: CacheTier, make_policy: Callable[[], EvictionPolicy]) -> None:
        self._tier = tier
        self._make_policy = make_policy
        self._make_next: Callable[[], EvictionPolicy] | None = None
        """Makes the policies that are to follow, while blocks are reported to them."""
        self._policies: dict[str, TailsFirst] = {}

    def __len__(self) -> int:
        """Return the number of blocks that all policies know."""
        return sum(len(policy) for policy in self._policies.values())

    def get(self, tenant: str) -> TailsFirst | None:
        """Return the policy of a tenant, None where it has nothing here."""
        return self._policies.get(tenant)

    def of(self, tenant: str) -> TailsFirst:
        """Return the policy of a tenant that has blocks here."""
        return self._policies[tenant]

    def made(self, tenant: str) -> TailsFirst:
        """Return the policy of a tenant, a new one where it has nothing here."""
        policy = self._policies.get(tenant)
        if policy is None:
            policy = self._policies[tenant] = TailsFirst(self._make_policy())
        return policy

    def forget(self, tenant: str) -> bool:
        """Let go of the policy of a tenant that has nothing left here, and return whether it went."""
        policy = self._policies[tenant]
        if len(policy) or policy.keeps:
            return False
        del self._policies[tenant]
        return True

    @property
    def follows_requests(self) -> bool:
        """Whether the policies use ``requested``."""
        return any(policy.follows_prompts or policy.counts_uses for policy in islice(self._policies.values(), 1))

    @property
    def has_successors(self) -> bool:
        """Whether a change of policies has begun."""
        return self._make_next is not None

    def begin_swap(self, make_policy: Callable[[], EvictionPolicy]) -> None:
        """Begin a swap to other policies; ``continue_swap`` reports the blocks to them.

        Another change that had begun is given up. The old ones go on choosing.
        """
        self._make_next = make_policy
        for policy in self._policies.values():
            policy.begin_hand_over(make_policy())

    def continue_swap(self, blocks: int) -> int:
        """Report so many more blocks to the successors, and return how many are missing. O(``blocks`` + tenants).

        When it raises, the change has been given up.
        """
        make_policy, self._make_next = self._make_next, None
        if make_policy is None:
            raise ValueError(f"{self._tier}: no change of policies has begun, or it was given up")
        missing = 0
        for policy in self._policies.values():
            if not policy.has_successor:  # of a tenant that came meanwhile
                policy.begin_hand_over(make_policy())
            before = policy.continue_hand_over(0)
            after = policy.continue_hand_over(min(blocks, before))
            blocks -= before - after
            missing += after
        self._make_next = make_policy
        return missing

    def end_swap(self, held: Mapping[str, Sequence[BlockId]]) -> None:
        """Activate the successors with the held blocks of each tenant. O(blocks).

        The old ones stay in charge when anything raises.
        """
        self.continue_swap(0)
        make_policy, self._make_next = self._make_next, None
        self._policies = {
            tenant: policy.end_hand_over(held.get(tenant, ())) for tenant, policy in self._policies.items()
        }
        if make_policy is not None:
            self._make_policy = make_policy

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when a policy contradicts itself. O(blocks)."""
        for policy in self._policies.values():
            policy.check_integrity()
