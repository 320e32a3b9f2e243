import json

import pytest

from gateway.errors import ApiError, NoInstanceError, RateLimitedError
from gateway.refusal import refusal_of_answer
from gateway.types import Dialect


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


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (404, "not_found_error"), (429, "rate_limit_error"), (500, "api_error")],
)
def test_anthropics_clients_get_anthropics_envelope(status: int, kind: str) -> None:
    body = b'{"message":"no","type":"x","code":400,"object":"error"}'
    assert json.loads(refusal_of_answer(status, body, Dialect.ANTHROPIC).body(Dialect.ANTHROPIC)) == {
        "type": "error",
        "error": {"type": kind, "message": "no"},
    }
    if status == 429:
        assert json.loads(RateLimitedError("no").body(Dialect.ANTHROPIC))["error"]["type"] == kind


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
