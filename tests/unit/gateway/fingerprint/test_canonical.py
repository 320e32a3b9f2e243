from typing import Any

import pytest

from gateway.fingerprint import ChatPrompt, canonical_chat
from gateway.fingerprint.opaque import Opaque


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video", "time_series"])
def test_anything_but_text_stays_a_part_of_its_message(kind: str) -> None:
    part: dict[str, Any] = {"type": kind, kind: {"url": "x"}}
    prompt = canonical_chat([{"role": "user", "content": [{"type": "text", "text": "what is this?"}, part]}])
    assert prompt.gap == "multimodal"
    assert prompt.messages[0]["content"] == ["what is this?", Opaque(part, "multimodal")]


def test_other_fields_of_a_message_reach_the_template() -> None:
    prompt = canonical_chat([{"role": "tool", "content": "7", "tool_call_id": "t"}])
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages == ({"role": "tool", "content": "7", "tool_call_id": "t"},)


def test_the_clients_messages_are_not_changed() -> None:
    call = {"function": {"name": "f", "arguments": '{"a":1}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    prompt = canonical_chat(messages)
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert messages == [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert call["function"]["arguments"] == '{"a":1}'  # type: ignore[index]


@pytest.mark.parametrize("arguments", ["not json", "[1]", "", None])
def test_arguments_that_are_no_object_stay_as_they_are(arguments: object) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    prompt = canonical_chat([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[0]["tool_calls"] == [call]


def test_only_allowed_tools_are_offered() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "fgh"]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tools[1]]}}
    prompt = canonical_chat([{"role": "user", "content": "x"}], tools=tools, tool_choice=allowed)
    assert isinstance(prompt, ChatPrompt)
    assert [tool["name"] for tool in prompt.kwargs["tools"]] == ["g"]
