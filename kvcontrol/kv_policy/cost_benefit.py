"""Is moving blocks worth it? Seconds that a reuse saves, times its probability, against seconds and bytes spent.

    saved  = P(reuse) x max(0, seconds to compute the blocks - seconds to load them)
    spent  = seconds of the transfer x what a background transfer costs others + bytes x price of a byte

Computing costs what the engine's prefills were measured to cost; loading and moving what the caller says, from its
measured bandwidths and what waits for them now. P(reuse) is counted: of the blocks that came into a tier, the share
that was loaded from it, both fading; one half before anything is known. Where computing or loading has not been
measured there is no estimate, and whoever asks goes on as if it didn't know.

The model checks itself: a prediction whose outcome is seen (a load's seconds, a prefill's) is told to it, and its error
is a metric. A load is worth its while from so many blocks on, ``break_even_blocks``: what must wait first is paid once,
the rest grows with the blocks.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy.allowed import (
    MOST_BYTES,
    MOST_CAPACITY_BLOCKS,
    MOST_TOKENS,
    check_number,
    check_share,
    check_whole,
)
from kvcontrol.kv_policy.prediction_error import ErrorReport, PredictionError
from kvcontrol.kv_policy.prefill_speed import PrefillSpeed

_PRIOR_BLOCKS = 64.0
"""Blocks of which half were reused, that count before there are others."""
_MEMORY_BLOCKS = 1 << 16
"""Blocks that came into a tier after which both counts are halved."""


class Quantity(StrEnum):
    """A quantity that is predicted and later observed, in seconds."""

    LOAD = "load"
    COMPUTE = "compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """``background`` is the share of a transfer's seconds that others lose by it, ``s_per_byte`` what a byte costs
    beside them: wear, or a link that is paid for.
    """

    background: float = 0.05
    s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        for name in ("background", "s_per_byte"):
            check_number(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """Blocks that might be moved: ``tokens`` and ``size_bytes`` of all of them together.

    ``block_ids`` is empty where the ``blocks`` have no ids yet.
    """

    src_tier: CacheTier
    dst_tier: CacheTier
    block_ids: Sequence[BlockId]
    blocks: int
    tokens: int
    size_bytes: int

    def __post_init__(self) -> None:
        check_whole("blocks", self.blocks, most=MOST_CAPACITY_BLOCKS)
        check_whole("tokens", self.tokens, most=MOST_TOKENS)
        check_whole("size_bytes", self.size_bytes, most=MOST_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Expected savings and costs of a move, in seconds."""

    saved_s: float
    spent_s: float
    reuse_probability: float

    def __post_init__(self) -> None:
        check_number("saved_s", self.saved_s)
        check_number("spent_s", self.spent_s)
        check_share("reuse_probability", self.reuse_probability)

    @property
    def net_benefit_s(self) -> float:
        """Saved less spent."""
        return self.saved_s - self.spent_s


class CostBenefitModel:
    """See the module's text. Belongs to the owner of the tiers; reports may be read from any thread.

    What was measured and can't be, as a clock may have it (``computed``, ``came``), counts for nothing. All else that
    can't be is refused with ``ValueError`` and changes nothing.
    """

    def __init__(self, prices: Prices | None = None) -> None:
        self.prefill = PrefillSpeed()
        self._prices = Prices() if prices is None else prices
        self._errors = {quantity: PredictionError() for quantity in Quantity}
        self._stored: dict[CacheTier, float] = defaultdict(lambda: _PRIOR_BLOCKS)
        self._reused: dict[CacheTier, float] = defaultdict(lambda: _PRIOR_BLOCKS / 2)

    # What was seen.

    def computed(self, tokens: int, seconds: float) -> None:
        """Follow a prefill."""
        tokens_per_s = self.prefill.tokens_per_s
        if self.prefill.measured(tokens, seconds) and tokens_per_s is not None:
            self.came(Quantity.COMPUTE, predicted_s=tokens / tokens_per_s, actual_s=seconds)

    def came(self, quantity: Quantity, *, predicted_s: float, actual_s: float) -> None:
        """Follow the outcome of a prediction."""
        self._errors[quantity].came(predicted=predicted_s, actual=actual_s)

    def stored(self, tier: CacheTier, blocks: int) -> None:
        """Follow blocks that came into a tier."""
        check_whole("blocks", blocks, most=MOST_CAPACITY_BLOCKS)
        self._stored[tier] += blocks
        if self._stored[tier] > _MEMORY_BLOCKS:
            self._stored[tier] /= 2
            self._reused[tier] /= 2

    def reused(self, tier: CacheTier, blocks: int) -> None:
        """Follow blocks that were loaded from a tier."""
        check_whole("blocks", blocks, most=MOST_CAPACITY_BLOCKS)
        self._reused[tier] += blocks

    # What follows.

    def reuse_probability(self, tier: CacheTier) -> float:
        """Return the share of a tier's blocks that is loaded from it; one that is loaded often counts often."""
        return min(1.0, self._reused[tier] / self._stored[tier])

    def load_saves_s(self, tokens: int, load_s: float | None) -> float | None:
        """Return the seconds that a load saves against computing, below 0 where it takes longer; None: unmeasured."""
        compute_s = self.prefill.seconds_for(tokens)
        if load_s is not None:
            check_number("load_s", load_s)
        return None if compute_s is None or load_s is None else compute_s - load_s

    def break_even_blocks(self, *, block_tokens: int, first_s: float | None, more_s: float | None) -> float | None:
        """Return from how many blocks on a load beats computing; ``inf`` where it never does, None: not measured.

        ``first_s`` is how long one block takes to load now, ``more_s`` by how much each further one lengthens that.
        """
        check_whole("block_tokens", block_tokens, least=1, most=MOST_TOKENS)
        for name, seconds in (("first_s", first_s), ("more_s", more_s)):
            if seconds is not None:
                check_number(name, seconds)
        compute_s = self.prefill.seconds_for(block_tokens)
        if compute_s is None or first_s is None or more_s is None:
            return None
        if first_s <= compute_s:
            return 1.0
        if more_s >= compute_s:
            return math.inf
        return math.ceil((first_s - more_s) / (compute_s - more_s))

    def evaluate_migration(
        self, migration: Migration, *, transfer_s: float | None, load_s: float | None, probability: float | None = None
    ) -> Estimate | None:
        """Return the net benefit of moving blocks; None if a measurement is missing.

        ``transfer_s`` is how long the move takes, ``load_s`` how long a load from where they are then. ``probability``
        of a reuse is the destination's own where none is given.
        """
        if probability is None:
            probability = self.reuse_probability(migration.dst_tier)
        else:
            check_share("probability", probability)
        if transfer_s is not None:
            check_number("transfer_s", transfer_s)
        saves_s = self.load_saves_s(migration.tokens, load_s)
        if saves_s is None or transfer_s is None:
            return None
        prices = self._prices
        return Estimate(
            saved_s=probability * max(0.0, saves_s),
            spent_s=prices.background * transfer_s + prices.s_per_byte * migration.size_bytes,
            reuse_probability=probability,
        )

    def errors(self) -> Mapping[Quantity, ErrorReport]:
        """Return how wrong the predictions of each quantity were."""
        return {quantity: error.report() for quantity, error in self._errors.items()}
