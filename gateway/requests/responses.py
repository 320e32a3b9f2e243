"""OpenAI's Responses API, as LMDeploy understands it: input items become chat messages.

Read from LMDeploy 0.18: instructions and system items form one system message, joined by blank lines; text parts are
joined without a separator; calls and their outputs become an assistant's and a tool's message.
"""

from collections.abc import Mapping
from typing import Any

from gateway.errors import InvalidRequestError
from gateway.fingerprint.canonical import Prompt, canonical_chat
from gateway.fingerprint.opaque import Opaque
from gateway.requests.bodies import Body

_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})


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
        return canonical_chat(self._messages(), tools=self._functions(), tool_choice=_choice(self.tool_choice))

    def _messages(self) -> list[dict[str, Any]]:
        system = [self.instructions] if self.instructions else []
        messages: list[dict[str, Any]] = []
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            for item in self.input:
                message = _message(item)
                if message["role"] == "system" and isinstance(message["content"], str):
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
    return {"role": "user", "content": [Opaque(item, "unknown_parts")]}


def _text(content: Any) -> str | list[Any]:
    """A content's text; where parts of it are none, the text before the first of those, and the others."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return [Opaque(content, "unknown_parts")]
    texts: list[str] = []
    for place, part in enumerate(content):
        match part:
            case {"type": str(kind), "text": str(text)} if kind in _TEXT_PARTS:
                texts.append(text)
            case _:
                rest = [Opaque(each, _gap_of(each)) for each in content[place:]]
                return [{"type": "text", "text": "".join(texts)}, *rest] if texts else rest
    return "".join(texts)


def _gap_of(part: Any) -> str:
    return "multimodal" if isinstance(part, Mapping) and part.get("type") == "input_image" else "unknown_parts"


def _choice(choice: Any) -> Any:
    match choice:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    return choice
