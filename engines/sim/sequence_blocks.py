"""The blocks of sequences: their own slots, which become cached blocks, and what is saved of them below HBM."""

from engines.sim.pool import PrefixPool
from engines.sim.sequence import SimSequence
from engines.sim.tiers import SimTiers
from kvcontrol.kv_policy import ShadowPolicies


class SequenceBlocks:
    """``attached`` leading blocks of a sequence are the pool's and held by it; ``own`` slots are its alone."""

    def __init__(self, block_tokens: int, pool: PrefixPool, tiers: SimTiers | None) -> None:
        self.shadows: ShadowPolicies | None = None
        self._block_tokens = block_tokens
        self._pool = pool
        self._tiers = tiers

    def let_go(self, sequence: SimSequence) -> None:
        """Release what a sequence has."""
        self._pool.release(sequence.request.chain.keys[: sequence.attached])
        self._pool.give(sequence.own)
        sequence.attached, sequence.own = 0, []

    def attach(self, sequence: SimSequence, upto: int) -> None:
        """Cache a sequence's blocks up to one, as far as their names are known."""
        chain, first = sequence.request.chain, sequence.attached
        upto = min(upto, len(chain.keys))
        if upto <= first:
            return
        self._pool.attach(chain.keys, first, upto, sequence.own[: upto - first], chain.block_tokens)
        del sequence.own[: upto - first]
        sequence.attached = upto
        if self.shadows is not None:  # of what it wasn't asked for: decoded
            self.shadows.stored(chain.keys[max(first, (sequence.target - 1) // self._block_tokens) : upto])

    def save(self, sequence: SimSequence, now_s: float, *, tail: bool) -> None:
        """Save what a sequence has computed in whole blocks of which the names are known."""
        chain = sequence.request.chain
        limit = min(sequence.computed // self._block_tokens, len(chain.keys))
        if self._tiers is not None and limit:
            slots = [*self._pool.cached.slots_of(chain.keys[: sequence.attached]), *sequence.own]
            self._tiers.save(chain, slots, sequence.request.tenant, limit, now_s, tail=tail)
