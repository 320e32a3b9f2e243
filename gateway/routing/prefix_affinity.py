"""The instance with the smallest expected time to the first token, given what it has cached and what it has to do.

    cost = prefill (uncached prompt tokens / speed)
         + work    (the same again: what the instance can't do for others meanwhile)
         + queue   (uncached tokens of requests before it / speed)
         + decode  (running requests x their delay)

A long cached prefix outweighs some load, a busy enough holder loses: there is no threshold that throws all affinity
away. A prompt that nobody has goes by load, and equal loads go to whoever got no such prompt for longest, so that cold
prefixes spread instead of all landing on the first instance. A prompt without a fingerprint goes by load, and says so.
"""

from typing import ClassVar

from gateway.routing.base import Candidate, CostModel, Decision, Query
from gateway.routing.scoring import load_terms, prefill_terms


class PrefixAffinity:
    """Cost in seconds; the lowest wins. O(candidates)."""

    name: ClassVar[str] = "prefix"

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs

    def choose(self, query: Query) -> Decision:
        terms: dict[str, dict[str, float]] = {}
        for each in query.candidates:
            own = {} if query.prompt_tokens is None else prefill_terms(each, query.prompt_tokens, self._costs)
            terms[each.instance] = own | load_terms(each, self._costs)

        def rank(each: Candidate) -> tuple[float, int, int, str]:
            return sum(terms[each.instance].values()), -each.matched_tokens, each.last_cold_turn, each.instance

        chosen = min(query.candidates, key=rank)
        most = max(each.expected_tokens for each in query.candidates)
        if query.gap is not None:
            basis, reason = "load", query.gap
        elif chosen.matched_tokens:
            basis, reason = "prefix", "longest_match" if chosen.expected_tokens == most else "busy_holder"
        elif chosen.expected_tokens:
            basis, reason = "prefix", "just_routed"
        else:
            basis, reason = "load", "busy_holder" if most else "cold"
        return Decision(
            candidate=chosen,
            basis=basis,
            reason=reason,
            cost_s={each.instance: terms[each.instance] for each in query.candidates},
        )


__all__ = ["PrefixAffinity"]
