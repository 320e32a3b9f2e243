"""An engine's refusal is classified once, and every dialect has its own well-known words for it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ContextLengthError
from gateway.errors.context_length import ContextLength, context_length_in
from gateway.types import Dialect, Operation
from gateway.upstream.refusal import RefusalKind, refusal_of_answer, refusal_of_event
from gateway.upstream.relay import AnswerShape, scanner_for

PROMPT_TOO_LONG = [
    "Input length ({n}) must be smaller than the model context length ({m}).",  # LMDeploy
    "The input ({n} tokens) is longer than the model's context length ({m} tokens).",
    "The decoder prompt (length {n}) is longer than the maximum model length of {m}. Make sure that `max_model_len` is",
    "This model's maximum context length is {m} tokens. However, your messages resulted in {n} tokens. Please reduce",
    "This model's maximum context length is {m} tokens. However, your prompt contains at least {n} input tokens, for a",
    "request ({n} tokens) exceeds the available context size ({m} tokens), try increasing it",
    "Input validation error: `inputs` must have less than {m} tokens. Given: {n}",
    "The sum of prompt length ({n}.0), query length (0) should not exceed max_num_tokens ({m})",
    "prompt is too long: {n} tokens > {m} maximum",
    "This model's maximum context length is {m} tokens. However, the input has {n} tokens at least. Please reduce its",
]
ANSWER_TOO_LONG = [
    "too large: {a}. This model's maximum context length is {m} tokens and your request has {n} input tokens",
    "You passed {n} input tokens and requested {a} output tokens. However, the model's context length is only {m}",
    "This model's maximum context length is {m} tokens. You requested 9 ({n} in the messages, {a} in the completion).",
    "exceeds the model's maximum context length of {m} tokens: {n} tokens from the input messages and {a} tokens for",
    "`inputs` tokens + `max_new_tokens` must be <= {m}. Given: {n} `inputs` tokens and {a} `max_new_tokens`",
    "input length and `max_tokens` exceed context limit: {n} + {a} > {m}, decrease input length or `max_tokens`",
]
ELSEWISE = [
    "The temperature 3 must be in [0, 2]",
    "the engine's maximum batch size is exceeded",
    "Please reduce your request rate",
    "CUDA error: operation not supported on global/shared address space",
    "",
]
SHAPES = [
    lambda text: {"object": "error", "message": text, "type": "invalid_request_error", "code": 400, "param": None},
    lambda text: {"error": {"message": text, "type": "BadRequestError", "param": None, "code": 400}},
    lambda text: {"error": {"message": text, "type": "invalid_request_error", "param": None, "code": None}},
    lambda text: {"detail": text},
    lambda text: {"type": "error", "error": {"type": "invalid_request_error", "message": text}},
    lambda text: text,
]
COUNTS = st.tuples(st.integers(1, 10**6), st.integers(0, 10**6))


def error_of(body: bytes) -> dict[str, str]:
    found: dict[str, str] = json.loads(body)["error"]
    return found


@given(
    words=st.sampled_from(PROMPT_TOO_LONG),
    counts=COUNTS,
    shape=st.sampled_from(SHAPES),
    status=st.sampled_from([400, 413, 422, 500]),
)
def test_a_prompt_beyond_the_context_is_known_by_its_code_and_its_phrase(
    words: str, counts: tuple[int, int], shape: object, status: int
) -> None:
    most, beyond = counts
    prompt = most + beyond
    assert callable(shape)
    said = json.dumps(shape(words.format(n=prompt, m=most))).encode()
    ours = refusal_of_answer(status, said)
    assert ours.kind is RefusalKind.CONTEXT
    assert ours.of_the_request
    assert ours.status < 500
    error = error_of(ours.body())
    assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
    assert "maximum context length" in error["message"]
    assert str(prompt) in error["message"]
    theirs = refusal_of_answer(status, said, Dialect.ANTHROPIC)
    error = error_of(theirs.body(Dialect.ANTHROPIC))
    assert error["type"] == ("request_too_large" if status == 413 else "invalid_request_error")
    if words.startswith("prompt is too long"):
        assert error["message"] == f"prompt is too long: {prompt} tokens > {most} maximum"
    else:
        assert error["message"] == f"prompt is too long: {prompt} tokens > {min(most, prompt - 1)} maximum"


@given(words=st.sampled_from(ANSWER_TOO_LONG), prompt=st.integers(1, 10**6), more=COUNTS)
def test_an_answer_that_does_not_fit_is_not_called_a_prompt_that_is_too_long(
    words: str, prompt: int, more: tuple[int, int]
) -> None:
    most, answer = prompt + more[0], more[1]
    found = context_length_in(words.format(n=prompt, m=most, a=answer))
    assert found == ContextLength(prompt_tokens=prompt, answer_tokens=answer, maximum_tokens=most)
    said = found.for_anthropic("x")
    assert said == f"input length and `max_tokens` exceed context limit: {prompt} + {answer} > {most}"
    assert f"({prompt} in the messages, {answer} in the completion)" in found.for_openai("x")


@given(text=st.text(max_size=200) | st.sampled_from(ELSEWISE), status=st.sampled_from([400, 404, 429, 500, 503]))
def test_what_is_about_something_else_is_not_taken_for_the_context(text: str, status: int) -> None:
    for dialect in Dialect:
        refusal = refusal_of_answer(status, json.dumps({"message": text}).encode(), dialect)
        assert refusal.kind is not RefusalKind.CONTEXT
        assert refusal.status == status
        json.loads(refusal.body(dialect))


@pytest.mark.parametrize("text", [" exceed" * 400, "(" * 3000, "context length is 1 tokens " * 400 + "exceed"])
def test_a_message_of_any_kind_is_classified(text: str) -> None:
    context_length_in(text)


@pytest.mark.parametrize(
    ("status", "said", "kind", "code"),
    [
        (400, "response_format is not supported", RefusalKind.UNSUPPORTED, "unsupported_parameter"),
        (501, "nothing of that", RefusalKind.UNSUPPORTED, "unsupported_parameter"),
        (400, "The temperature 3 must be in [0, 2]", RefusalKind.SCHEMA, "invalid_request"),
        (422, "Field required", RefusalKind.SCHEMA, "invalid_request"),
        (401, "Unauthorized.", RefusalKind.AUTH, "invalid_api_key"),
        (429, "slow down, the context length is exceeded", RefusalKind.OVERLOAD, "rate_limit_exceeded"),
        (503, "Engine is sleeping", RefusalKind.OVERLOAD, "engine_unavailable"),
        (500, "CUDA error: operation not supported", None, "engine_error"),
        (404, "The model does not exist", None, "not_found"),
    ],
)
def test_other_refusals_have_a_kind_and_a_code(status: int, said: str, kind: RefusalKind | None, code: str) -> None:
    refusal = refusal_of_answer(status, json.dumps({"message": said}).encode())
    assert (refusal.kind, refusal.reason) == (kind, code)


def test_a_500_is_the_requests_fault_where_the_engine_says_so() -> None:
    said = {"error": {"message": "1 validation error", "type": "ValidationError", "code": 500}}
    refusal = refusal_of_answer(500, json.dumps(said).encode())
    assert (refusal.status, refusal.of_the_request) == (400, True)
    assert not refusal_of_answer(500, b"Internal Server Error").of_the_request


def test_an_engines_right_code_stays_byte_for_byte() -> None:
    right = {"error": {"message": "too long", "type": "t", "param": None, "code": "context_length_exceeded"}}
    body = json.dumps(right).encode()
    assert refusal_of_answer(400, body).body() is body


def test_the_gateways_own_limit_is_told_in_the_same_words() -> None:
    error = ContextLengthError("it may use 5", ContextLength(prompt_tokens=9, maximum_tokens=5))
    assert error_of(error.body())["code"] == "context_length_exceeded"
    assert error_of(error.body(Dialect.ANTHROPIC))["message"] == "prompt is too long: 9 tokens > 5 maximum"


LONG = "Input length (9) must be smaller than the model context length (5)."


@pytest.mark.parametrize(
    ("operation", "event", "expected"),
    [
        (
            Operation.CHAT,
            b'data: {"error": {"message": "%b", "type": "invalid_request_error", "code": 400}}\n\n',
            '"code":"context_length_exceeded"',
        ),
        (
            Operation.MESSAGES,
            b'event: error\ndata: {"type": "error", "error": {"type": "invalid_request_error", "message": "%b"}}\n\n',
            "prompt is too long: 9 tokens > 5 maximum",
        ),
        (
            Operation.RESPONSES,
            b'event: error\ndata: {"type": "error", "code": "bad", "message": "%b", "sequence_number": 0}\n\n',
            '"code":"context_length_exceeded"',
        ),
        (
            Operation.RESPONSES,
            b'data: {"error": {"message": "%b", "type": "BadRequestError", "code": 400}}\n\n',
            '"code":"context_length_exceeded"',
        ),
        (
            Operation.RESPONSES,
            b'data: {"type":"response.failed","response":{"error":{"code":"invalid_prompt","message":"%b"}}}\n\n',
            "response.failed",
        ),
    ],
)
def test_a_refusal_within_a_stream_has_the_same_words_and_is_the_requests_fault(
    operation: Operation, event: bytes, expected: str
) -> None:
    scanner = scanner_for(AnswerShape(operation, stream=True))
    out = scanner.feed(event % LONG.encode()).decode()
    assert expected in out
    assert (scanner.failed, scanner.refused) == (True, True)
    assert out.count("9") >= 1
    assert out.endswith("\n\n")


@pytest.mark.parametrize("operation", [Operation.CHAT, Operation.MESSAGES, Operation.RESPONSES])
def test_an_engine_that_breaks_within_a_stream_is_at_fault(operation: Operation) -> None:
    scanner = scanner_for(AnswerShape(operation, stream=True))
    scanner.feed(b'data: {"error": {"message": "out of memory", "type": "server_error"}}\n\n')
    assert (scanner.failed, scanner.refused) == (True, False)


def test_an_event_that_can_not_be_read_is_no_refusal() -> None:
    assert refusal_of_event(b"{") is None
