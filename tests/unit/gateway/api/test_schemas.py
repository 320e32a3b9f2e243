import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.schemas import parse_call
from gateway.errors import InvalidRequestError
from gateway.fingerprint import ChatPrompt, TokenPrompt, Unreadable
from gateway.fingerprint.canonical import TextPrompt
from gateway.types import Operation

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    more=st.dictionaries(st.text(min_size=1), JSON, max_size=4),
    ascii_only=st.booleans(),
    indent=st.none() | st.just(2),
    options=st.sampled_from(["absent", None, {}, {"include_usage": None, "x": 1}]),
)
def test_asking_for_usage_changes_nothing_else_in_any_body(
    *, more: dict[str, object], ascii_only: bool, indent: int | None, options: object
) -> None:
    reserved = {"model", "stream", "stream_options", "prompt"}
    said = {key: value for key, value in more.items() if key not in reserved}
    said |= {"model": "m", "prompt": "x", "stream": True}
    if options != "absent":
        said["stream_options"] = options
    body = json.dumps(said, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    call = parse_call(Operation.COMPLETIONS, body)
    assert call.hide_usage
    sent = json.loads(call.body)
    assert sent["stream_options"]["include_usage"] is True
    said.pop("stream_options", None)
    del sent["stream_options"]
    assert sent == said


@pytest.mark.parametrize(
    "more", [{}, {"stream": False}, {"stream": None}, {"stream": True, "stream_options": {"include_usage": True}}]
)
def test_a_body_that_needs_no_change_stays_the_same_object(more: dict[str, object]) -> None:
    body = json.dumps({"model": "m", "prompt": "x"} | more).encode()
    call = parse_call(Operation.COMPLETIONS, body)
    assert call.body is body
    assert not call.hide_usage


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("x", TextPrompt(text="x")),
        (["x"], TextPrompt(text="x")),
        ([1, 2], TokenPrompt(token_ids=(1, 2))),
        ([[1, 2]], TokenPrompt(token_ids=(1, 2))),
        (["x", "y"], Unreadable(reason="several_prompts")),
        ([[1], [2]], Unreadable(reason="several_prompts")),
        ([], Unreadable(reason="unknown_prompt")),
        ([[]], Unreadable(reason="unknown_prompt")),
        ([1.5], Unreadable(reason="unknown_prompt")),
        ([True], Unreadable(reason="unknown_prompt")),
    ],
)
def test_every_shape_of_a_completions_prompt_is_understood(prompt: object, expected: object) -> None:
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    assert parse_call(Operation.COMPLETIONS, body).prompt == expected


def test_a_chat_without_messages_may_bring_tokens() -> None:
    body = json.dumps({"model": "m", "messages": [], "input_ids": [3, 4]}).encode()
    assert parse_call(Operation.CHAT, body).prompt == TokenPrompt(token_ids=(3, 4))


def test_keys_that_only_look_doubled_are_allowed() -> None:
    schema = {"properties": {"model": {"type": "string"}, "stream": {"type": "boolean"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    content = 'say "model": and \\u0041'
    said = {"model": "m", "messages": [{"role": "user", "content": content}], "tools": [tool], "stream": False}
    call = parse_call(Operation.CHAT, json.dumps(said).encode())
    assert isinstance(call.prompt, ChatPrompt)
    assert call.prompt.messages[0]["content"] == content


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","prompt":"x","model":"n"}',
        b'{"model":"m","prompt":"x","prom\\u0070t":"y"}',
        b'{"stream":false,"model":"m","prompt":"x","stream":true}',
    ],
)
def test_a_key_given_twice_is_refused_by_name(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="more than once"):
        parse_call(Operation.COMPLETIONS, body)
