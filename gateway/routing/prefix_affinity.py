"""Chooses the instance with the longest match among those close to the lowest load.

No speeds, no seconds: only counts. Whoever has more than ``_WINDOW`` requests beyond the least busy one is out, however
much it holds; among the others the longest prefix wins, and a cold prompt goes to who got none for longest. A beginning
that all prompts share doesn't keep them at its first instance: one that has nothing else in common with others goes to
an instance that got none of the latest requests, if there is any and the beginning is computed again in one chunk.
Simple and predictable; ``cost_aware`` knows what a match is worth.
"""

from typing import ClassVar

from gateway.routing.base import Candidate, CostModel, Decision, Query
from gateway.routing.field import STARVED, Field

_WINDOW = 8


class PrefixAffinity:
    """O(candidates)."""

    name: ClassVar[str] = "prefix_affinity"

    def __init__(self, costs: CostModel) -> None:
        del costs

    def choose(self, query: Query) -> Decision:
        candidates = query.candidates
        field = candidates if isinstance(candidates, Field) else Field.of(candidates)
        least = min(each.running for each in candidates)
        open_to_it = [each for each in candidates if each.running <= least + _WINDOW]

        def rank(each: Candidate) -> tuple[int, int, int, int, str]:
            if query.gap is not None or not each.expected_tokens:
                return 0, each.running, each.last_cold_request, each.last_request, each.instance
            return -each.expected_tokens, each.running, 0, each.last_request, each.instance

        chosen = min(open_to_it, key=rank)
        most = max(each.expected_tokens for each in candidates)
        if query.gap is not None:
            return Decision(candidate=chosen, basis="load", reason=query.gap)
        if chosen.expected_tokens and (at := field.starved(field.columns.places[chosen.instance])) is not None:
            other = field.at(at)
            if other in open_to_it:
                return Decision(candidate=other, basis="load", reason=STARVED)
        if not chosen.expected_tokens:
            return Decision(candidate=chosen, basis="load", reason="busy_holder" if most else "cold")
        if chosen.expected_tokens < most:
            reason = "busy_holder"
        else:
            reason = "longest_match" if chosen.matched_tokens else "just_routed"
        return Decision(candidate=chosen, basis="prefix", reason=reason)
