"""Named cost terms, in seconds until a request's first token."""

from collections.abc import Mapping

from gateway.routing.base import CHUNK_TOKENS, Candidate, Speeds
from kvcontrol.core.blocks import CacheTier

WAIT_TERMS = ("base", "prefill", "load", "queue", "decode", "slot")
"""Terms that the request itself waits for: their sum is the predicted time to its first token. The others say what its
placement costs somebody else."""


def before_tokens(candidate: Candidate, own_tokens: int | None) -> int:
    """Return the tokens that are computed there before a prompt of which ``own_tokens`` are still to be computed; None
    where that isn't known.

    Between two chunks of a long prompt an engine takes in short ones. So one that fits into a chunk waits for no more
    than a chunk of those that don't, and where its conversation lies isn't lost to it while a long one is under way.
    """
    if own_tokens is None or own_tokens > CHUNK_TOKENS:
        return candidate.prefill_tokens
    return candidate.prefill_tokens - candidate.passed_tokens


def load_terms(candidate: Candidate, speeds: Speeds, own_tokens: int | None = None) -> dict[str, float]:
    """What the work that is there already costs a new request: ``queue`` is the prefill before it, ``decode`` the steps
    that running requests take in between, ``slot`` the wait for a place when all that it runs at once are taken.
    """
    running = candidate.in_flight + candidate.foreign_requests
    terms = {
        "queue": before_tokens(candidate, own_tokens) / speeds.prefill_tokens_per_s,
        "decode": running * speeds.decode_load_s,
    }
    if candidate.slots and running >= candidate.slots:
        before = running - candidate.slots + 1
        terms["slot"] = before * speeds.answer_s / candidate.slots
    return terms


def prefill_terms(candidate: Candidate, prompt_tokens: int, speeds: Speeds) -> dict[str, float]:
    """What the prompt itself costs there: ``prefill`` is the request's wait for its uncached part, ``load`` for what
    lies below HBM, ``work`` the prefill again, which the instance can't give to anybody else, and ``room`` once more:
    what is computed is cached, and pushes out as much that somebody may come back for.

    Without ``work``, waiting for a sibling that computes the same prefix would look as dear as computing it a second
    time on an idle instance, and a burst of siblings would scatter.
    """
    seconds = (prompt_tokens - candidate.expected_tokens) / speeds.prefill_tokens_per_s
    terms = {"prefill": seconds, "work": seconds, "room": seconds}
    if speeds.reload_s_per_token and (load := reload_s(candidate.tokens_by_tier, speeds)):
        terms["load"] = load
    return terms


def base_term(speeds: Speeds) -> dict[str, float]:
    """What every request waits there."""
    return {"base": speeds.base_s} if speeds.base_s else {}


def load_s(candidate: Candidate, speeds: Speeds, own_tokens: int | None = None) -> float:
    """Return the sum of ``load_terms``, without making them."""
    running = candidate.in_flight + candidate.foreign_requests
    seconds = before_tokens(candidate, own_tokens) / speeds.prefill_tokens_per_s + running * speeds.decode_load_s
    slots = candidate.slots
    if slots and running >= slots:
        seconds += (running - slots + 1) * speeds.answer_s / slots
    return seconds


def reload_s(tokens_by_tier: Mapping[CacheTier, int], speeds: Speeds) -> float:
    """Return the time to bring all of these tokens into HBM."""
    seconds = 0.0
    for tier, tokens in tokens_by_tier.items():
        seconds += tokens * speeds.reload_s_per_token.get(tier, 0.0)
    return seconds


def wait_s(candidate: Candidate, prompt_tokens: int, speeds: Speeds) -> float:
    """Return the predicted time to the first token, as ``predicted_wait_s`` of the terms, without making them."""
    own_tokens = prompt_tokens - candidate.expected_tokens
    seconds = speeds.base_s + load_s(candidate, speeds, own_tokens) + own_tokens / speeds.prefill_tokens_per_s
    if speeds.reload_s_per_token:
        seconds += reload_s(candidate.tokens_by_tier, speeds)
    return seconds


def predicted_wait_s(terms: Mapping[str, float]) -> float:
    """Return the predicted time to the first token."""
    seconds = 0.0
    for name in WAIT_TERMS:
        seconds += terms.get(name, 0.0)
    return seconds
