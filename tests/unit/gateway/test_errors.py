import json

import pytest

from gateway.errors import ApiError, NoInstanceError, envelope_of_answer


def read(status: int, body: bytes) -> dict[str, object]:
    error: dict[str, object] = json.loads(envelope_of_answer(status, body))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_a_right_envelope_is_the_same_object() -> None:
    body = b'{"error": {"message": "m", "type": "t", "param": null, "code": 7}, "more": 1}'
    assert envelope_of_answer(400, body) is body


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
