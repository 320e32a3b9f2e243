"""What one request may ask of an engine: everything that would make a step fail for the whole batch is refused here.

LMDeploy runs all requests in one loop, and what it trusts (a token id, a ``top_k``, a list of stop tokens) goes
straight into tensors; a value out of range ends the loop, and every other request with it. Pure: no LMDeploy, no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

LEAST_TEMPERATURE = 1e-3
"""Logits divided by less than this overflow; a request for less is one for greedy decoding."""

_REPETITION_PENALTY = (0.01, 100.0)
_LARGEST_INT = 2**31 - 1


class RefusedError(ValueError):
    """The engine can't run this request; the message names the field and what is allowed."""


class TooLongError(RefusedError):
    """A prompt of ``tokens`` tokens, or of so many at least, is longer than the context of ``most`` tokens."""

    def __init__(self, tokens: int, most: int) -> None:
        super().__init__(
            f"This model's maximum context length is {most} tokens. However, the input has {tokens} tokens at least. "
            "Please reduce its length."
        )
        self.tokens = tokens
        self.most = most


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What an engine can take; the engine process tells the api_server."""

    vocab_tokens: int
    context_tokens: int
    repetition_window_tokens: int


@dataclass(slots=True, kw_only=True)
class Sampling:
    """The sampling of one request, whatever LMDeploy calls its fields on this side of the process boundary."""

    top_k: int
    top_p: float
    min_p: float
    temperature: float
    repetition_penalty: float
    min_new_tokens: int
    max_new_tokens: int
    logprobs: int
    stop_ids: list[int]
    bad_ids: list[int]
    ngram_size: int
    ngram_threshold: int
    bias_ids: list[int]
    ignore_eos: bool


def check_prompt(ids: Sequence[int], limits: EngineLimits) -> None:
    """Raise ``RefusedError`` unless these are tokens of the model, one at least."""
    if not ids:
        raise RefusedError("the prompt has no tokens; at least 1 is required")
    check_ids("input_ids", ids, limits)


def check_length(tokens: int, limits: EngineLimits) -> None:
    """Raise ``TooLongError`` for more tokens than the context has."""
    if tokens > limits.context_tokens:
        raise TooLongError(tokens, limits.context_tokens)


def check_ids(field: str, ids: Sequence[int], limits: EngineLimits) -> None:
    """Raise ``RefusedError`` for the first of ``ids`` that is no token of the model. On both event loops: about 40 ns
    a token, where all are fine.
    """
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < limits.vocab_tokens):
        return
    for each in ids:
        if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < limits.vocab_tokens:
            raise RefusedError(f"{field} holds {_short(each)}; token ids of 0 to {limits.vocab_tokens - 1} are allowed")


def settle(sampling: Sampling, limits: EngineLimits, *, prompt_tokens: int) -> None:
    """Bring ``sampling`` to what the engine can run without a change of meaning, or raise ``RefusedError``.

    A ``top_k`` of the vocabulary or more means all tokens, which LMDeploy writes as 0. Stop and bad tokens that the
    model can't produce (a model's own configuration may list such) are left out.
    """
    _check_range("top_p", sampling.top_p, 0.0, 1.0)
    _check_range("min_p", sampling.min_p, 0.0, 1.0)
    _check_range("temperature", sampling.temperature, 0.0, 2.0)
    _check_range("repetition_penalty", sampling.repetition_penalty, *_REPETITION_PENALTY)
    _check_range("repetition_ngram_size", sampling.ngram_size, 0, limits.repetition_window_tokens)
    _check_range("repetition_ngram_threshold", sampling.ngram_threshold, 0, _LARGEST_INT)
    _check_range("logprobs", sampling.logprobs, -1, limits.vocab_tokens)
    check_ids("logit_bias", sampling.bias_ids, limits)
    if sampling.temperature < LEAST_TEMPERATURE:
        sampling.temperature, sampling.top_k = 1.0, 1
    if sampling.top_k < 0:
        raise RefusedError(f"top_k is {_short(sampling.top_k)}; 0 (all tokens) or more is allowed")
    if sampling.top_k >= limits.vocab_tokens:
        sampling.top_k = 0
    check_length(prompt_tokens + min(sampling.max_new_tokens, 1), limits)
    sampling.max_new_tokens = min(sampling.max_new_tokens, limits.context_tokens - prompt_tokens)
    _check_range("min_new_tokens", sampling.min_new_tokens, 0, sampling.max_new_tokens)
    sampling.stop_ids = _producible(sampling.stop_ids, limits)
    sampling.bad_ids = _producible(sampling.bad_ids, limits)
    never = set(sampling.bad_ids)
    if sampling.ignore_eos or sampling.min_new_tokens > 0:
        never.update(sampling.stop_ids)
    if len(never) >= limits.vocab_tokens:
        raise RefusedError("stop (or bad_words) covers every token of the model, so that none could be generated")


def _producible(ids: Sequence[int], limits: EngineLimits) -> list[int]:
    return [each for each in ids if 0 <= each < limits.vocab_tokens]


def _check_range(field: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:  # so it is for NaN
        raise RefusedError(f"{field} is {_short(value)}; {least} to {most} are allowed")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"  # noqa: PLR2004 - one line of a message
