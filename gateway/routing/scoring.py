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
    """What the prompt's own uncached part costs there."""
    return {"prefill": (prompt_tokens - candidate.expected_tokens) / costs.prefill_tokens_per_s}


__all__ = ["load_terms", "prefill_terms"]
