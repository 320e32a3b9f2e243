"""Anthropic's Messages API, as LMDeploy understands it: content blocks become chat messages.

Read from LMDeploy 0.18: text blocks of the system prompt are joined without a separator, except one with a billing
header; a message's text blocks stay parts (one alone becomes its text); tool results come before the message that holds
them, their images as a message of the user's behind them; thinking becomes ``reasoning_content``. System messages among
the others stay where they are if the model's template renders them there, and move to the front otherwise.
"""

import json
from collections.abc import Mapping
from typing import Any

from gateway.errors import InvalidRequestError
from gateway.fingerprint.canonical import Prompt, canonical_chat
from gateway.fingerprint.opaque import Opaque
from gateway.requests.bodies import Body, check_tokens, with_images


class MessagesBody(Body, frozen=True, kw_only=True):
    """``POST /v1/messages``."""

    messages: list[dict[str, Any]] | None = None
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    input_ids: list[int] | None = None
    image_data: Any = None

    def prompt_of(self) -> Prompt:
        if not self.messages:
            if self.input_ids is None:
                raise InvalidRequestError("messages: is empty; at least one message is needed", param="messages")
            check_tokens(self.input_ids, "input_ids")
            return with_images(self.input_ids, self.image_data)
        messages = [*_system(self.system), *(part for each in self.messages for part in _converted(each))]
        return canonical_chat(
            messages,
            tools=_functions(self.tools),
            tool_choice=_choice(self.tool_choice),
            inline_system=any(each.get("role") == "system" for each in self.messages),
        )


def _system(entry: Any) -> list[dict[str, Any]]:
    if isinstance(entry, list):
        texts = [block.get("text") for block in entry if isinstance(block, Mapping) and block.get("type") == "text"]
        entry = "".join(
            text for text in texts if isinstance(text, str) and not text.startswith("x-anthropic-billing-header")
        )
    return [{"role": "system", "content": entry}] if entry and isinstance(entry, str) else []


def _converted(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One message of theirs as those of a chat."""
    role, content = message.get("role"), message.get("content")
    if role == "system":
        return _system(content)
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        return [{"role": role, "content": [Opaque(content, "unknown_parts")]}]
    blocks = _Blocks()
    for block in content:
        blocks.add(block, from_user=role == "user")
    return blocks.as_chat(role)


class _Blocks:
    """The content blocks of one message, by what becomes of them."""

    def __init__(self) -> None:
        self._results: list[dict[str, Any]] = []
        self._parts: list[dict[str, Any] | Opaque] = []
        self._calls: list[dict[str, Any]] = []
        self._thoughts: list[str] = []

    def add(self, block: Any, *, from_user: bool) -> None:
        match block:
            case {"type": "text", "text": str(text)}:
                self._parts += [{"type": "text", "text": text}] if text else []
            case {"type": "tool_use", "id": str(identity), "name": str(name), **rest}:
                function = {"name": name, "arguments": json.dumps(rest.get("input") or {})}
                self._calls.append({"id": identity, "type": "function", "function": function})
            case {"type": "tool_result"} if from_user:
                self._results += _result(block)
            case {"type": "thinking", "thinking": str(thought)}:
                self._thoughts.append(thought)
            case {"type": "redacted_thinking"}:
                pass
            case {"type": "image"}:
                self._parts.append(Opaque(block, "multimodal"))
            case _:
                self._parts.append(Opaque(block, "unknown_parts"))

    def as_chat(self, role: Any) -> list[dict[str, Any]]:
        entry: dict[str, Any] = {"role": role}
        if self._thoughts:
            entry["reasoning_content"] = "".join(self._thoughts)
        if self._calls:
            entry["tool_calls"] = self._calls
        if self._parts:
            match self._parts:
                case [{"text": text}]:
                    entry["content"] = text
                case parts:
                    entry["content"] = parts
        return [*self._results, entry] if len(entry) > 1 else self._results


def _result(block: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = block.get("content")
    items = [each for each in content if isinstance(each, Mapping)] if isinstance(content, list) else []
    texts = [str(each.get("text", "")) for each in items if each.get("type") == "text"]
    entry = {
        "role": "tool",
        "tool_call_id": block.get("tool_use_id") or block.get("id") or "",
        "content": content if isinstance(content, str) else "\n".join(texts),
    }
    images = [Opaque(each, "multimodal") for each in items if each.get("type") == "image"]
    return [entry, {"role": "user", "content": images}] if images else [entry]


def _functions(tools: list[Any] | None) -> list[dict[str, Any]]:
    return [
        {
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description"),
                "parameters": tool.get("input_schema"),
            }
        }
        for tool in tools or ()
        if isinstance(tool, Mapping)
    ]


def _choice(choice: Any) -> Any:
    match choice:
        case {"type": "tool", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    return None
