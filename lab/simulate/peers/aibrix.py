"""AIBrix's prefix cache router: the best match among those that aren't busier than most.

max - min requests > 8 -> only those with fewest requests, the best match among them
else                   -> by match, then by requests: the first with at most mean + 1 standard deviation of them
nobody matches         -> fewest requests

Its table knows of a prefix as soon as it has routed it: matches include what was just routed.
"""

from statistics import fmean, pstdev
from typing import ClassVar, Final

from gateway.routing import Candidate, Decision, Query

IMBALANCE: Final = 8
DEVIATIONS: Final = 1.0


class AibrixPrefixCache:
    """See the module's text."""

    name: ClassVar[str] = "aibrix_prefix_cache"

    def choose(self, query: Query) -> Decision:
        """See ``RoutingPolicy``."""
        candidates = query.candidates
        loads = [each.running for each in candidates]
        least = min(loads)
        if max(loads) - least > IMBALANCE:
            idle = [each for each in candidates if each.running == least]
            return Decision(candidate=min(idle, key=_by_match), basis="load", reason="imbalanced")
        bound = fmean(loads) + DEVIATIONS * pstdev(loads)
        matched = [each for each in candidates if each.expected_tokens and each.running <= bound]
        if matched:
            return Decision(candidate=min(matched, key=_by_match), basis="prefix", reason="longest_match")
        chosen = min(candidates, key=lambda each: (each.running, each.last_request))
        return Decision(candidate=chosen, basis="load", reason="cold")


def _by_match(each: Candidate) -> tuple[int, int, int]:
    return -each.expected_tokens, each.running, each.last_request
