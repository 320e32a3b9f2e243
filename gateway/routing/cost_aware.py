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

from collections.abc import Callable
from functools import partial
from typing import ClassVar

from gateway.routing.base import Candidate, CostModel, Costs, Decision, Query
from gateway.routing.scoring import base_term, load_terms, prefill_terms, reload_s

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
        candidates, prompt_tokens = query.candidates, query.prompt_tokens
        most = max([each.expected_tokens for each in candidates])
        least_recent = min([each.recent_tokens for each in candidates])
        warm = most > 0
        spread, assumed = self._costs.spread, self._assumed
        costs: list[float] = []
        for _, matched, tiers, expected, in_flight, queued, foreign, slots, recent, _, _, known in candidates:
            # The sum of ``_terms``, without making them: a tenth of the time.
            speeds = known or assumed
            speed, delay_s = speeds.prefill_tokens_per_s, speeds.decode_load_s
            running = in_flight + foreign
            tokens = float(queued)
            if prompt_tokens is not None:
                tokens += 2 * (prompt_tokens - expected)
            if warm and recent > least_recent:
                tokens += min(spread * (recent - least_recent), _MOST_EXCESS_TOKENS)
            cost = speeds.base_s + tokens / speed + running * (max(_LEAST_SHARE_S, delay_s))
            if slots and running >= slots:
                cost += (running - slots + 1) * speeds.answer_s / slots
            if matched and prompt_tokens is not None and speeds.reload_s_per_token:
                cost += reload_s(tiers, speeds)
            costs.append(cost)
        lowest = min(costs)
        bound = lowest + max(_TIE_S, lowest * _TIE_SHARE)
        excess = partial(self._excess, least_recent)
        chosen = min(
            [(each, cost) for each, cost in zip(candidates, costs, strict=True) if cost <= bound],
            key=lambda tied: _rank(tied[0], tied[1], excess(tied[0]), warm=warm),
        )[0]
        if query.gap is not None:
            basis, reason = "load", query.gap
        elif chosen.matched_tokens:
            basis, reason = "prefix", "longest_match" if chosen.expected_tokens == most else "busy_holder"
        elif chosen.expected_tokens:
            basis, reason = "prefix", "just_routed"
        else:
            basis, reason = "load", "busy_holder" if most else "cold"
        terms = partial(self._terms, prompt_tokens, excess if warm else None)
        return Decision(candidate=chosen, basis=basis, reason=reason, cost_s=Costs(candidates, terms))

    def _excess(self, least_recent: float, each: Candidate) -> float:
        """Uncached work that it was given lately, beyond the others, as far as that counts."""
        return min(self._costs.spread * (each.recent_tokens - least_recent), _MOST_EXCESS_TOKENS)

    def _terms(
        self, prompt_tokens: int | None, excess: Callable[[Candidate], float] | None, each: Candidate
    ) -> dict[str, float]:
        speeds = each.speeds or self._assumed
        terms = base_term(speeds)
        if prompt_tokens is not None:
            terms |= prefill_terms(each, prompt_tokens, speeds)
        terms |= load_terms(each, speeds)
        if share := each.running * max(0.0, _LEAST_SHARE_S - speeds.decode_load_s):
            terms["share"] = share
        if excess is not None and (tokens := excess(each)):
            terms["spread"] = tokens / speeds.prefill_tokens_per_s
        return terms


def _rank(each: Candidate, cost_s: float, excess: float, *, warm: bool) -> tuple[int, float, int, float, str]:
    """Who goes first of those whose costs tie: the least."""
    turn = 0 if each.expected_tokens else each.last_cold_turn
    return 0 if warm else each.running, excess - each.expected_tokens, turn, cost_s, each.instance


__all__ = ["CostAware"]
