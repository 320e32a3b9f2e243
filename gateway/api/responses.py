"""OpenAI's Responses API, as LMDeploy understands it: input items become chat messages.

Read from LMDeploy 0.18: instructions and system items form one system message, joined by blank lines; text parts are
joined without a separator; calls and their outputs become an assistant's and a tool's message.
"""

from collections.abc import Mapping
from typing import Any

from gateway.api.bodies import Body
from gateway.errors import InvalidRequestError
from gateway.fingerprint.canonical import Prompt, Unreadable, canonical_chat

_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
_UNKNOWN = Unreadable(reason="unknown_parts")


class _UnknownPartsError(Exception):
    """The engine will say what it can't take."""


class ResponsesBody(Body, frozen=True, kw_only=True):
    """``POST /v1/responses``."""

    input: str | list[Any]
    instructions: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    max_output_tokens: float | None = None

    @property
    def answer_tokens(self) -> int | None:
        return None if self.max_output_tokens is None else int(self.max_output_tokens)

    def prompt_of(self) -> Prompt:
        if not self.input:
            raise InvalidRequestError("input: is empty; a prompt has at least one token", param="input")
        try:
            messages = self._messages()
        except _UnknownPartsError:
            return _UNKNOWN
        return canonical_chat(messages, tools=self._functions(), tool_choice=_choice(self.tool_choice))

    def _messages(self) -> list[dict[str, Any]]:
        system = [self.instructions] if self.instructions else []
        messages: list[dict[str, Any]] = []
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            for item in self.input:
                message = _message(item)
                if message["role"] == "system":
                    system.append(message["content"])
                else:
                    messages.append(message)
        return [{"role": "system", "content": "\n\n".join(system)}, *messages] if system else messages

    def _functions(self) -> list[dict[str, Any]]:
        if self.tool_choice == "none":
            return []
        return [
            {"function": {each: tool.get(each) for each in ("name", "description", "parameters")}}
            for tool in self.tools or ()
            if isinstance(tool, Mapping) and tool.get("type") == "function"
        ]


def _message(item: Any) -> dict[str, Any]:
    match item:
        case {"type": "function_call", "name": str(name), **rest}:
            arguments = rest.get("arguments") or ""
            identity = rest.get("call_id") or rest.get("id")
            call = {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        case {"type": "function_call_output", "call_id": str(identity), **rest}:
            return {"role": "tool", "tool_call_id": identity, "content": _text(rest.get("output", ""))}
        case {"role": str(role), **rest} if rest.get("type", "message") == "message":
            return {"role": "system" if role == "developer" else role, "content": _text(rest.get("content", ""))}
    raise _UnknownPartsError


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _UnknownPartsError
    parts: list[str] = []
    for part in content:
        match part:
            case {"type": str(kind), "text": str(text)} if kind in _TEXT_PARTS:
                parts.append(text)
            case _:
                raise _UnknownPartsError
    return "".join(parts)


def _choice(choice: Any) -> Any:
    match choice:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    return choice


__all__ = ["ResponsesBody"]
