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

from functools import partial
from typing import ClassVar, Final

from gateway.routing.base import Candidate, CostModel, Costs, Decision, Query
from gateway.routing.scoring import base_term, load_terms, prefill_terms, wait_s
from gateway.routing.standings import LEAST_SHARE_S, MOST_EXCESS_TOKENS, Standings
from kvcontrol.core.ids import InstanceId

_TIE_S = 0.005
_TIE_SHARE = 0.05
_MOST_STANDINGS: Final = 64


class CostAware:
    """Cost in seconds; the lowest wins. O(candidates), of which most costs a few passes over columns of numbers.

    What is kept between two queries (``Standings``, one for each beginning of a list of candidates) saves work and
    decides nothing.
    """

    name: ClassVar[str] = "cost_aware"

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._assumed = costs.speeds()
        self._standings: dict[InstanceId, Standings] = {}

    def choose(self, query: Query) -> Decision:
        candidates, prompt_tokens = query.candidates, query.prompt_tokens
        standings = self._following(candidates)
        expected = standings.expected
        most = max(expected.values()) if expected else 0
        costs_s = standings.costs_s(prompt_tokens)
        lowest_s = min(costs_s)
        bound_s = lowest_s + max(_TIE_S, lowest_s * _TIE_SHARE)
        tied = [at for at, cost_s in enumerate(costs_s) if cost_s <= bound_s]
        chosen = candidates[tied[0] if len(tied) == 1 else _first(tied, standings, costs_s)]
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
            cost_s=Costs(candidates, partial(self._terms, candidates, prompt_tokens)),
            wait_s=None if prompt_tokens is None else wait_s(chosen, prompt_tokens, chosen.speeds or self._assumed),
        )

    def _following(self, candidates: tuple[Candidate, ...]) -> Standings:
        """What is kept of the last list that began with this instance, brought up to date."""
        kept = self._standings.get(candidates[0].instance)
        if kept is None:
            if len(self._standings) >= _MOST_STANDINGS:
                self._standings.clear()
            kept = self._standings[candidates[0].instance] = Standings(self._assumed, self._costs.spread)
        kept.follow(candidates)
        return kept

    def _terms(self, candidates: tuple[Candidate, ...], prompt_tokens: int | None, each: Candidate) -> dict[str, float]:
        """The cost of one by name: the same sum as in ``Standings``, said a second time for whoever looks."""
        speeds = each.speeds or self._assumed
        terms = base_term(speeds)
        if prompt_tokens is not None:
            terms |= prefill_terms(each, prompt_tokens, speeds)
        terms |= load_terms(each, speeds)
        if share := each.running * max(0.0, LEAST_SHARE_S - speeds.decode_load_s):
            terms["share"] = share
        if any(other.expected_tokens for other in candidates):
            least_recent = min(other.recent_tokens for other in candidates)
            excess = min(self._costs.spread * (each.recent_tokens - least_recent), MOST_EXCESS_TOKENS)
            if excess:
                terms["spread"] = excess / speeds.prefill_tokens_per_s
        return terms


def _first(tied: list[int], standings: Standings, costs_s: list[float]) -> int:
    """Who goes first of those whose costs tie: by most of the prompt less the excess; cold prompts by requests that
    run before that, and then to whoever got none for longest.
    """
    candidates, expected = standings.candidates, standings.expected
    if expected:
        excesses = standings.excesses(tied)
        worth = [excess - expected.get(at, 0) for at, excess in zip(tied, excesses, strict=True)]
    else:
        running = standings.running
        fewest = min([running[at] for at in tied])
        tied = [at for at in tied if running[at] == fewest]
        worth = standings.excesses(tied)
    least = min(worth)
    return min(
        [at for at, each in zip(tied, worth, strict=True) if each == least],
        key=lambda at: (0 if at in expected else candidates[at].last_cold_turn, costs_s[at], candidates[at].instance),
    )


__all__ = ["CostAware"]
