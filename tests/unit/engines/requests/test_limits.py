from dataclasses import replace
from typing import Any

import pytest

from engines.requests.limits import EngineLimits, RefusedError, Sampling, check_ids, check_prompt, settle

LIMITS = EngineLimits(vocab_tokens=100, context_tokens=64, repetition_window_tokens=32)
PLAIN = Sampling(
    top_k=40,
    top_p=1.0,
    min_p=0.0,
    temperature=0.8,
    repetition_penalty=1.0,
    min_new_tokens=0,
    max_new_tokens=8,
    logprobs=-1,
    stop_ids=[2],
    bad_ids=[],
    ngram_size=0,
    ngram_threshold=0,
    bias_ids=[],
    ignore_eos=False,
)


def _settled(prompt_tokens: int = 4, **fields: Any) -> Sampling:
    sampling = replace(PLAIN, **fields)
    settle(sampling, LIMITS, prompt_tokens=prompt_tokens)
    return sampling


def test_an_ordinary_request_is_left_as_it_is() -> None:
    assert _settled() == PLAIN


@pytest.mark.parametrize("top_k", [100, 10**9, 2**70])
def test_a_top_k_of_the_vocabulary_or_more_means_all_tokens(top_k: int) -> None:
    assert _settled(top_k=top_k).top_k == 0


def test_the_largest_top_k_below_the_vocabulary_is_kept() -> None:
    assert _settled(top_k=99).top_k == 99


@pytest.mark.parametrize("temperature", [0.0, 1e-300])
def test_a_temperature_that_would_overflow_is_greedy(temperature: float) -> None:
    settled = _settled(temperature=temperature)
    assert (settled.temperature, settled.top_k) == (1.0, 1)


def test_no_more_is_generated_than_the_context_holds() -> None:
    assert _settled(prompt_tokens=60, max_new_tokens=2**70).max_new_tokens == 4


def test_stop_tokens_that_the_model_cannot_produce_are_left_out() -> None:
    settled = _settled(stop_ids=[2, -7, 100, 2**70], bad_ids=[99, 100])
    assert (settled.stop_ids, settled.bad_ids) == ([2], [99])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": float("nan")}, "top_p is nan; 0.0 to 1.0 are allowed"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty is nan"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"min_new_tokens": 9}, "min_new_tokens is 9; 0 to 8 are allowed"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"logprobs": 101}, "logprobs is 101"),
        ({"ngram_size": 33}, "repetition_ngram_size is 33"),
        ({"ngram_threshold": 2**70}, "repetition_ngram_threshold is 1180591620717411303424"),
        ({"bias_ids": [100]}, "logit_bias holds 100; token ids of 0 to 99 are allowed"),
        ({"prompt_tokens": 64}, "maximum context length is 64 tokens. However, the input has 65 tokens"),
        ({"bad_ids": list(range(100))}, "covers every token"),
        ({"stop_ids": list(range(100)), "min_new_tokens": 1}, "covers every token"),
        ({"stop_ids": list(range(100)), "ignore_eos": True}, "covers every token"),
    ],
)
def test_what_would_end_the_loop_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedError) as refusal:
        _settled(**fields)
    assert message in str(refusal.value)


def test_stopping_at_any_token_is_allowed() -> None:
    assert _settled(stop_ids=list(range(100))).stop_ids == list(range(100))


def test_a_prompt_may_fill_the_context_when_nothing_is_generated() -> None:
    assert _settled(prompt_tokens=64, max_new_tokens=0).max_new_tokens == 0


@pytest.mark.parametrize("each", [-1, 100, 2**70, True, "5", None, 1.0])
def test_only_token_ids_of_the_model_are_tokens(each: Any) -> None:
    with pytest.raises(RefusedError, match="stop_token_ids holds"):
        check_ids("stop_token_ids", [0, each], LIMITS)


def test_a_prompt_has_a_token() -> None:
    check_prompt([0, 99], LIMITS)
    with pytest.raises(RefusedError, match="no tokens"):
        check_prompt([], LIMITS)


def test_a_message_does_not_repeat_a_huge_value() -> None:
    with pytest.raises(RefusedError) as refusal:
        check_ids("input_ids", [10**4000], LIMITS)
    assert len(str(refusal.value)) < 150
