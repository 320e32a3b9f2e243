"""Named cost terms, in seconds until a request's first token."""

from gateway.routing.base import Candidate, CostModel


def load_terms(candidate: Candidate, costs: CostModel) -> dict[str, float]:
    """What the work that is there already costs a new request: ``queue`` is the prefill before it, ``decode`` the steps
    that running requests take in between.
    """
    return {
        "queue": candidate.prefill_tokens / costs.prefill_tokens_per_s,
        "decode": (candidate.in_flight + candidate.foreign_requests) * costs.decode_load_s,
    }


def prefill_terms(candidate: Candidate, prompt_tokens: int, costs: CostModel) -> dict[str, float]:
    """What the prompt's own uncached part costs there: ``prefill`` is the request's own wait for it, ``work`` the same
    time again, which the instance can't give to anybody else.

    Without ``work``, waiting for a sibling that computes the same prefix would look as dear as computing it a second
    time on an idle instance, and a burst of siblings would scatter.
    """
    seconds = (prompt_tokens - candidate.expected_tokens) / costs.prefill_tokens_per_s
    return {"prefill": seconds, "work": seconds}


__all__ = ["load_terms", "prefill_terms"]
