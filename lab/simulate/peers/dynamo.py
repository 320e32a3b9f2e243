"""Dynamo's cost, in tokens where it counts blocks; the lowest wins.

    cost = 1.0 x max(prefill that is under way + prompt - overlap, 0) + what is held by those that run + prompt
    overlap = tokens in HBM + 0.75 x in host memory + 0.25 x on disk

What is held is estimated (``held.py``), each prompt counted whole: Dynamo counts blocks that requests share once.
"""

from typing import ClassVar, Final

from gateway.routing import Candidate, Decision, Query
from kvcontrol.core.blocks import CacheTier
from lab.simulate.peers.held import HeldPrompts

CREDIT: Final = {CacheTier.HBM: 1.0, CacheTier.DDR: 0.75, CacheTier.NVME: 0.25, CacheTier.REMOTE: 0.25}


class DynamoCost:
    """See the module's text; remembers what it placed."""

    name: ClassVar[str] = "dynamo_cost"

    def __init__(self) -> None:
        self._held = HeldPrompts()

    def choose(self, query: Query) -> Decision:
        """See ``RoutingPolicy``."""
        prompt = query.prompt_tokens or 0

        def cost(each: Candidate) -> tuple[float, int]:
            credit = sum(CREDIT[tier] * tokens for tier, tokens in each.tokens_by_tier.items())
            credit += max(0, each.expected_tokens - each.matched_tokens)  # what it predicts of its own routes
            prefill = max(each.prefill_tokens + prompt - credit, 0.0)
            return prefill + self._held.tokens(each) + prompt, each.last_request

        chosen = min(query.candidates, key=cost)
        self._held.placed(chosen.instance, prompt)
        basis = "prefix" if chosen.expected_tokens else "load"
        return Decision(candidate=chosen, basis=basis, reason="lowest_cost")
