"""The instance where a request costs least, in seconds, given what each has cached and has to do.

    cost = base    (what every request waits there)
         + prefill (uncached prompt tokens / speed)
         + load    (cached tokens below HBM x the time to bring one back)
         + queue   (uncached tokens of requests before it / speed)
         + decode  (running requests x their delay)
         + slot    (wait for a place, when the instance runs all that it can)
         + share   (what running requests lose to one more, where that was measured to be next to nothing)
         + work    (the prefill again: what the instance can't do for others meanwhile)
         + spread  (a share of the uncached work that it was given lately, beyond the others)

Speeds are each instance's own, measured from the answers that it gave. A long cached prefix outweighs some load, a busy
enough holder loses: there is no threshold that throws all affinity away. ``spread`` is small: it can't drive a
conversation from its instance, but a system prompt that all conversations share is copied to where there is room,
instead of drawing all of them to one place. For a prompt that nobody has cached it only breaks ties, or one enormous
prompt would keep all others away from its instance for minutes.

Costs are estimates, so those within a few milliseconds, or a few percent, of the lowest tie. Ties go to who has most of
the prompt, less ``spread``; cold ones to who runs least now, to who got least work lately, and then to who got no cold
prompt for longest.
"""

from typing import ClassVar

from gateway.routing.base import Candidate, CostModel, Decision, Query
from gateway.routing.scoring import base_term, load_terms, prefill_terms

_TIE_S = 0.005
_TIE_SHARE = 0.05
_LEAST_SHARE_S = 0.005
"""Without it, two equal instances of which one once began an answer a little later would not share a burst."""
_MOST_EXCESS_TOKENS = 8192


class CostAware:
    """Cost in seconds; the lowest wins. O(candidates)."""

    name: ClassVar[str] = "cost_aware"

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._assumed = costs.speeds()

    def choose(self, query: Query) -> Decision:
        warm = any(each.expected_tokens for each in query.candidates)
        least_recent = min(each.recent_tokens for each in query.candidates)
        terms: dict[str, dict[str, float]] = {}
        total: dict[str, float] = {}
        excess: dict[str, float] = {}
        for each in query.candidates:
            speeds = each.speeds or self._assumed
            own = base_term(speeds)
            if query.prompt_tokens is not None:
                own |= prefill_terms(each, query.prompt_tokens, speeds)
            own |= load_terms(each, speeds)
            if share := each.running * max(0.0, _LEAST_SHARE_S - speeds.decode_load_s):
                own["share"] = share
            lately = self._costs.spread * (each.recent_tokens - least_recent)
            excess[each.instance] = min(lately, _MOST_EXCESS_TOKENS)
            if warm and excess[each.instance]:
                own["spread"] = excess[each.instance] / speeds.prefill_tokens_per_s
            terms[each.instance] = own
            total[each.instance] = sum(own.values())
        lowest = min(total.values())
        bound = lowest + max(_TIE_S, lowest * _TIE_SHARE)

        def rank(each: Candidate) -> tuple[int, float, int, float, str]:
            net = each.expected_tokens - excess[each.instance]
            turn = 0 if each.expected_tokens else each.last_cold_turn
            return 0 if warm else each.running, -net, turn, total[each.instance], each.instance

        tied = [each for each in query.candidates if total[each.instance] <= bound]
        chosen = min(tied, key=rank)
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


__all__ = ["CostAware"]
