import json

import pytest

from gateway.errors import ApiError, ContextLengthError, NoInstanceError
from gateway.errors.context_length import ContextLength
from gateway.types import Dialect
from gateway.upstream.refusal import refusal_of_answer, refusal_of_event


def read(status: int, body: bytes) -> dict[str, object]:
    error: dict[str, object] = json.loads(refusal_of_answer(status, body).body())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_a_right_envelope_is_the_same_object() -> None:
    body = b'{"error": {"message": "m", "type": "t", "param": null, "code": "c"}, "more": 1}'
    assert refusal_of_answer(400, body).body() is body
    body = b'{"type": "error", "error": {"type": "not_found_error", "message": "m"}}'
    assert refusal_of_answer(404, body, Dialect.ANTHROPIC).body(Dialect.ANTHROPIC) is body


def test_a_number_as_a_code_becomes_a_word() -> None:
    body = b'{"error": {"message": "m", "type": "t", "param": "p", "code": 400}}'
    assert read(400, body) == {"message": "m", "type": "t", "param": "p", "code": "invalid_request"}


@pytest.mark.parametrize("said", [b"\xff", b"[" * 100_000, b"1" * 6_000])
def test_an_error_that_can_not_be_read_is_shown_as_it_came(said: bytes) -> None:
    error = read(400, b'{"error": {"message": "' + said + b'", "code": ' + said + b"}}")
    assert str(error["message"]).startswith('{"error": {"message": "')
    assert error["code"] == "invalid_request"


ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "invalid_request_error",
    412: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "api_error",
    501: "api_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
    508: "api_error",
    529: "overloaded_error",
}
"""The type of each status in Anthropic's envelope."""
OPENAI = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "invalid_request_error",
    412: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    529: "service_unavailable_error",
}
"""The type of each status in OpenAI's envelope, where an engine's error has none."""
SAID = [
    {"message": "no", "type": "x", "code": 400, "object": "error"},
    {"detail": "no"},
    {"error": {"message": "no", "type": "BadGatewayError", "code": None}},
    {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}},
    {"type": "error", "error": {"type": "api_error", "message": "no"}},
    {"type": "error", "error": {"type": "odd", "message": "no"}},
]


def own_errors(base: type[ApiError] = ApiError) -> list[type[ApiError]]:
    return [base, *(below for each in base.__subclasses__() for below in own_errors(each))]


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize(("status", "kind"), ANTHROPIC.items())
def test_an_error_of_any_shape_has_the_type_of_its_status_in_anthropics_envelope(
    status: int, kind: str, said: dict[str, object]
) -> None:
    refusal = refusal_of_answer(status, json.dumps(said).encode(), Dialect.ANTHROPIC)
    expected = kind if refusal.status == status else ANTHROPIC[refusal.status]
    assert json.loads(refusal.body(Dialect.ANTHROPIC)) == {
        "type": "error",
        "error": {"type": expected, "message": "no"},
    }


@pytest.mark.parametrize(("status", "kind"), OPENAI.items())
def test_an_error_without_a_type_has_the_type_of_its_status_in_openais_envelope(status: int, kind: str) -> None:
    assert read(status, b'{"detail": "no"}')["type"] == kind


@pytest.mark.parametrize("error", own_errors())
def test_the_gateways_own_errors_have_the_same_types(error: type[ApiError]) -> None:
    refused = error.__new__(error)
    ApiError.__init__(refused, "no")
    if issubclass(error, ContextLengthError):
        refused.length = ContextLength()
    assert json.loads(refused.body(Dialect.ANTHROPIC))["error"]["type"] == ANTHROPIC[error.status]
    if error.status in OPENAI:
        assert json.loads(refused.body())["error"]["type"] == OPENAI[error.status]


@pytest.mark.parametrize("kind", sorted({*ANTHROPIC.values()}))
def test_an_error_event_keeps_any_type_that_anthropics_clients_know(kind: str) -> None:
    event = json.dumps({"type": "error", "error": {"type": kind, "message": "no"}}).encode()
    refusal = refusal_of_event(event, Dialect.ANTHROPIC)
    assert refusal is not None
    assert refusal.body(Dialect.ANTHROPIC) is event


def test_an_error_event_of_an_unknown_type_gets_a_known_one() -> None:
    event = b'{"type": "error", "error": {"type": "odd", "message": "no"}}'
    refusal = refusal_of_event(event, Dialect.ANTHROPIC)
    assert refusal is not None
    assert json.loads(refusal.body(Dialect.ANTHROPIC))["error"] == {"type": "api_error", "message": "no"}


def test_lmdeploys_shape_keeps_message_type_and_param() -> None:
    body = b'{"message":"The model does not exist.","type":"not_found","code":404,"param":"model","object":"error"}'
    assert read(404, body) == {
        "message": "The model does not exist.",
        "type": "not_found",
        "param": "model",
        "code": "not_found",
    }


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b'{"detail":"Not Found"}', "Not Found", None),
        (b'{"detail":[{"loc":["body","messages"],"msg":"Field required"}]}', "messages: Field required", "messages"),
        (b'{"detail":["odd"]}', "odd", None),
        (b'{"error":"flat"}', "flat", None),
        (b'"text"', "text", None),
        (b"Internal Server Error", "Internal Server Error", None),
        (b"\xff\xfe", "\ufffd\ufffd", None),
        (b"", "the engine answered with status 500 and no message", None),
        (b"[]", "the engine answered with status 500 and no message", None),
        (b"[" * 100_000, None, None),
    ],
)
def test_every_other_shape_becomes_an_envelope(body: bytes, message: str | None, param: str | None) -> None:
    error = read(500, body)
    assert message is None or error["message"] == message
    assert error["param"] == param
    assert error["type"] == "server_error"


def test_a_refusal_carries_what_its_answer_needs() -> None:
    error: ApiError = NoInstanceError("nobody", retry_after_s=2)
    assert error.status == 503
    assert json.loads(error.body())["error"]["code"] == "no_instance"
