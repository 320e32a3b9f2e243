"""SGLang's cache-aware router (as SMG has it): the longest match, unless the fleet is out of balance.

    imbalanced: max - min load > 64 and max > 1.5 x min   -> least load
    match rate > 0.3                                      -> the one that matches
    else                                                  -> least load, then who got a request longest ago

It matches characters in a tree of what it has routed; here, tokens of our index and of what was just routed.
"""

from typing import ClassVar, Final

from gateway.routing import Candidate, Decision, Query

BALANCE_ABS: Final = 64
BALANCE_REL: Final = 1.5
CACHE_THRESHOLD: Final = 0.3


class SglangCacheAware:
    """See the module's text."""

    name: ClassVar[str] = "sglang_cache_aware"

    def choose(self, query: Query) -> Decision:
        """See ``RoutingPolicy``."""
        candidates = query.candidates
        loads = [each.running for each in candidates]
        most, least = max(loads), min(loads)
        if most - least > BALANCE_ABS and most > BALANCE_REL * least:
            return Decision(candidate=min(candidates, key=_load), basis="load", reason="imbalanced")
        best = max(candidates, key=lambda each: each.expected_tokens)
        if query.prompt_tokens and best.expected_tokens / query.prompt_tokens > CACHE_THRESHOLD:
            return Decision(candidate=best, basis="prefix", reason="longest_match")
        return Decision(candidate=min(candidates, key=_load), basis="load", reason="cold")


def _load(each: Candidate) -> tuple[int, int]:
    return each.running, each.last_request
