"""llm-d's weighted scorers with the weights of its default profile; the highest sum wins.

    2 x queue + 2 x KV cache use + 3 x prefix,    each from 0 to 1

    queue   (longest - own) / (longest - shortest), 1 where all are equal
    KV use  1 - share of the cache that running requests hold
    prefix  matched / prompt, what was just routed included

A query says neither of the first two: queued are requests beyond an instance's slots, and what is held is estimated
(``held.py``). llm-d reads both from the instances, every 50 ms.
"""

from typing import ClassVar, Final

from gateway.routing import Candidate, Decision, Query
from lab.simulate.peers.held import HeldPrompts

QUEUE: Final = 2.0
KV_USE: Final = 2.0
PREFIX: Final = 3.0


class LlmDScorers:
    """See the module's text; ``capacity_tokens`` fit into an instance's HBM. Remembers what it placed."""

    name: ClassVar[str] = "llm_d_scorers"

    def __init__(self, *, capacity_tokens: int) -> None:
        if capacity_tokens < 1:
            raise ValueError(f"room for {capacity_tokens} tokens; there must be some")
        self._capacity_tokens = capacity_tokens
        self._held = HeldPrompts()

    def choose(self, query: Query) -> Decision:
        """See ``RoutingPolicy``."""
        queued = [_queued(each) for each in query.candidates]
        longest, spread = max(queued), max(queued) - min(queued)
        prompt = query.prompt_tokens or 0

        def score(each: Candidate) -> tuple[float, int]:
            queue = (longest - _queued(each)) / spread if spread else 1.0
            use = min(1.0, self._held.tokens(each) / self._capacity_tokens)
            prefix = each.expected_tokens / prompt if prompt else 0.0
            return QUEUE * queue + KV_USE * (1 - use) + PREFIX * prefix, -each.last_request

        chosen = max(query.candidates, key=score)
        self._held.placed(chosen.instance, prompt)
        return Decision(candidate=chosen, basis="prefix" if chosen.expected_tokens else "load", reason="highest_score")


def _queued(each: Candidate) -> int:
    return max(0, each.running - each.slots) if each.slots else 0
