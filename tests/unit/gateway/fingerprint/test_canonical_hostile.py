"""Whatever a client puts into tools and tool calls, its prompt is read or left unread, and nothing is raised."""

from typing import Any

import pytest

from gateway.fingerprint import ChatPrompt, canonical_chat

CALLS_TOO_DEEP = [{"function": {"name": "f", "arguments": "[" * 3_000 + "]" * 3_000}}]


@pytest.mark.parametrize(
    "choice", [{"allowed_tools": {"tools": ["x", 7, None, {"function": "f"}]}}, {"function": 3}, 5]
)
def test_a_tool_choice_of_any_shape(choice: Any) -> None:
    read = canonical_chat([{"role": "user", "content": "x"}], tools=[{"function": {"name": "f"}}], tool_choice=choice)
    assert isinstance(read, ChatPrompt)


def test_arguments_nested_too_deep_stay_text() -> None:
    read = canonical_chat([{"role": "assistant", "content": None, "tool_calls": CALLS_TOO_DEEP}])
    assert isinstance(read, ChatPrompt)
    assert read.messages[0]["tool_calls"] == CALLS_TOO_DEEP
