"""Requests that belong together go to one instance, found by hashing alone (rendezvous hashing, Thaler and
Ravishankar 1998; bounded loads after Mirrokni and others, 2018).

Each instance's weight for a key is a hash of both; the heaviest wins. When an instance comes or goes, only the keys
that it wins move. An instance with more than 1.25 times its fair share of the running requests is passed over for the
next one, so that a hot key can't drown it. Needs no index and agrees between gateways that don't know each other.
Rejected: a ring (uneven without hundreds of points an instance).
"""

from math import ceil
from typing import ClassVar

import xxhash

from gateway.routing.base import Candidate, CostModel, Decision, Query

_LOAD_FACTOR = 1.25


class ConsistentHash:
    """O(candidates log candidates)."""

    name: ClassVar[str] = "consistent_hash"

    def __init__(self, costs: CostModel) -> None:
        del costs

    def choose(self, query: Query) -> Decision:
        key = query.key
        if key is None:
            chosen = min(query.candidates, key=lambda each: (each.running, each.last_request, each.instance))
            return Decision(candidate=chosen, basis="load", reason=query.gap or "no_key")

        def weight(each: Candidate) -> int:
            return xxhash.xxh3_64_intdigest(each.instance.encode() + b"\x00" + key)

        ranked = sorted(query.candidates, key=weight, reverse=True)
        running = sum(each.running for each in ranked) + 1
        most = ceil(running * _LOAD_FACTOR / len(ranked))
        chosen = next((each for each in ranked if each.running < most), ranked[0])
        return Decision(candidate=chosen, basis="hash", reason="owner" if chosen is ranked[0] else "busy_owner")
