"""Chooses the instance with the lowest cost of a request in seconds, from cached tokens and load.

    cost = base    (what every request waits there)
         + prefill (uncached prompt tokens / speed)
         + load    (cached tokens below HBM x the time to bring one back)
         + queue   (uncached tokens of requests before it / speed; of long ones a chunk, where it is short)
         + decode  (running requests x their delay)
         + slot    (wait for a place, when the instance runs all that it can)
         + share   (what running requests lose to one more, where that was measured to be next to nothing)
         + work    (the prefill again: what the instance can't do for others meanwhile)
         + room    (and again: the blocks that it fills push out others that somebody may come back for)
         + spread  (a share of the uncached work that it was given lately, beyond the others)

Speeds are each instance's own, measured from the answers that it gave. A long cached prefix outweighs some load, a busy
enough holder loses: there is no threshold that throws all affinity away. ``spread`` is small: it can't drive a
conversation from its instance, but a system prompt that all conversations share is copied to where there is room,
instead of drawing all of them to one place. Where all have as much of a prompt, there is nothing to copy, and where
nobody has any it only breaks ties, or one enormous prompt would keep all others away from its instance for minutes.

Costs are estimates, so those within a few milliseconds, or a few percent, of the lowest tie. Ties go to who has most of
the prompt, and between those that have as much to who costs least; cold ones to who runs least now, to who got least
work lately, and then to who got no cold prompt for longest.

``spread`` fades with time, so where requests are rare a beginning that all prompts share would keep all of them at its
first instance, and the memory of the others empty. An instance that got none of the latest requests therefore gets a
prompt that has only such a beginning in common with others, where it costs no more but for that, and the beginning is
computed again in one chunk.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import ClassVar, Final

from gateway.routing.base import Candidate, CostModel, Costs, Decision, Query
from gateway.routing.field import STARVED, CandidateColumns, Field, Held
from gateway.routing.scoring import base_term, load_terms, prefill_terms, wait_s
from gateway.routing.standings import LEAST_SHARE_S, MOST_EXCESS_TOKENS, Standings
from kvcontrol.core.ids import InstanceId

_MOST_STANDINGS: Final = 64
_expected_of = itemgetter(2)


class CostAware:
    """Cost in seconds; the lowest wins. O(candidates that hold some of the prompt) where those cost clearly less than
    the others could, else O(candidates).

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
        field = candidates if isinstance(candidates, Field) else Field.of(candidates)
        standings = self._following(field.columns)
        holding = field.held
        tied = standings.tied(prompt_tokens, holding)
        at = next(iter(tied)) if len(tied) == 1 else _first(tied, standings, holding)
        other = _starved(field, at, standings, prompt_tokens) if at in holding else None
        chosen = field.at(at if other is None else other)
        if query.gap is not None:
            basis, reason = "load", query.gap
        elif other is not None:
            basis, reason = "load", STARVED
        elif chosen.matched_tokens:
            most = max(map(_expected_of, holding.values()), default=0)
            basis, reason = "prefix", "longest_match" if chosen.expected_tokens == most else "busy_holder"
        elif chosen.expected_tokens:
            basis, reason = "prefix", "just_routed"
        else:
            basis, reason = "load", "busy_holder" if holding else "cold"
        return Decision(
            candidate=chosen,
            basis=basis,
            reason=reason,
            cost_s=Costs(candidates, partial(self._terms, candidates, prompt_tokens)),
            wait_s=None if prompt_tokens is None else wait_s(chosen, prompt_tokens, chosen.speeds or self._assumed),
        )

    def _following(self, columns: CandidateColumns) -> Standings:
        """What is kept of the last columns that began with this instance."""
        kept = self._standings.get(columns.names[0])
        if kept is None or kept.columns is not columns:
            if len(self._standings) >= _MOST_STANDINGS:
                self._standings.clear()
            kept = self._standings[columns.names[0]] = Standings(columns, self._assumed, self._costs.spread)
        return kept

    def _terms(self, candidates: Sequence[Candidate], prompt_tokens: int | None, each: Candidate) -> dict[str, float]:
        """The cost of one by name: the same sum as in ``Standings``, said a second time for whoever looks."""
        speeds = each.speeds or self._assumed
        terms = base_term(speeds)
        own_tokens = None
        if prompt_tokens is not None:
            own_tokens = prompt_tokens - each.expected_tokens
            terms |= prefill_terms(each, prompt_tokens, speeds)
        terms |= load_terms(each, speeds, own_tokens)
        if share := each.running * max(0.0, LEAST_SHARE_S - speeds.decode_load_s):
            terms["share"] = share
        if len({other.expected_tokens for other in candidates}) > 1:
            least_recent = min(other.recent_tokens for other in candidates)
            excess = min(self._costs.spread * (each.recent_tokens - least_recent), MOST_EXCESS_TOKENS)
            if excess:
                terms["spread"] = excess / speeds.prefill_tokens_per_s
        return terms


def _starved(field: Field, at: int, standings: Standings, prompt_tokens: int | None) -> int | None:
    """Return who gets the prompt instead of a holder because it got no request for long, None for nobody."""
    other = field.starved(at)
    if other is None or other == at:
        return None
    return other if standings.costs_no_more(other, at, prompt_tokens) else None


def _first(tied: Mapping[int, float], standings: Standings, holding: Mapping[int, Held]) -> int:
    """Who goes first of those whose costs tie: who has most of the prompt, then who costs least, then who got least
    work lately; cold prompts by requests that run before that, and then to whoever got none for longest.
    """
    columns = standings.columns
    if holding:
        return min(
            tied,
            key=lambda at: (-holding[at][2] if at in holding else 0, tied[at], columns.recent[at], columns.names[at]),
        )
    running = columns.running
    fewest = min([running[at] for at in tied])
    places = [at for at in tied if running[at] == fewest]
    excesses = standings.excesses(places)
    least = min(excesses)
    return min(
        [at for at, each in zip(places, excesses, strict=True) if each == least],
        key=lambda at: (columns.last_cold_requests[at], tied[at], columns.names[at]),
    )
