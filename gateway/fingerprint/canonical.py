"""LMDeploy's changes to a request before its chat template, so that both render the same text.

Read from LMDeploy 0.18: message parts of type text are joined by newlines; a missing or null content is empty; tool
call arguments that are JSON text become objects; a tool is passed to the template as its function alone, with exactly
the fields description, name, parameters; ``enable_thinking`` and ``reasoning_effort`` join ``chat_template_kwargs`` and
are left out when null.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.fingerprint.opaque import Opaque
from kvcontrol.tokenization.chat_template import parsed_call

_MULTIMODAL = frozenset(
    {
        "image_url",
        "image_data",
        "image",
        "video_url",
        "video",
        "audio_url",
        "audio",
        "input_audio",
        "time_series_url",
        "time_series",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """Messages as the template gets them, with the template's keyword arguments. A content is text, or a list of texts
    and ``Opaque`` parts: then ``gap`` is the first one's. ``inline_system`` says that system messages stand among the
    others: where the model's template leaves those out, they move to the front.
    """

    messages: tuple[Mapping[str, Any], ...]
    kwargs: Mapping[str, Any]
    gap: str | None = None
    inline_system: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """Text that is tokenized as it is."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrompt:
    """Token ids that the client chose."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A prompt without a fingerprint; ``reason`` is one word from a small fixed set. ``tokens`` is about how many it
    has, None where nobody knows. ``chars`` are those of its text, or of the longest one where each is a prompt.
    """

    reason: str
    tokens: int | None = None
    chars: int = 0


Prompt = ChatPrompt | TextPrompt | TokenPrompt | Unreadable


def canonical_chat(  # noqa: PLR0913 - the fields of a request that change its prompt
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: object = None,
    template_kwargs: Mapping[str, Any] | None = None,
    enable_thinking: bool | None = None,
    reasoning_effort: str | None = None,
    inline_system: bool = False,
) -> ChatPrompt:
    """Return the input of the template."""
    rendered = [_with_tool_arguments({**message, "content": _content(message.get("content"))}) for message in messages]
    kwargs = dict(template_kwargs or {})
    if enable_thinking is not None and kwargs.get("enable_thinking") is None:
        kwargs["enable_thinking"] = enable_thinking
    if kwargs.get("enable_thinking", ...) is None:
        del kwargs["enable_thinking"]
    effort = kwargs.pop("reasoning_effort", None) if reasoning_effort is None else reasoning_effort
    if effort is not None:
        kwargs["reasoning_effort"] = effort
    kwargs["tools"] = _functions(tools or (), tool_choice) or None
    gap: str | None = None
    for each in rendered:
        if isinstance(each["content"], list):  # rare: one with an opaque part
            gap = next(part.gap for part in each["content"] if isinstance(part, Opaque))
            break
    return ChatPrompt(messages=tuple(rendered), kwargs=kwargs, gap=gap, inline_system=inline_system)


def _kind(part: object) -> object:
    return part.get("type") if isinstance(part, Mapping) else None


def _content(content: object) -> str | list[str | Opaque]:
    match content:
        case None:
            return ""
        case str():
            return content
        case list():
            parts = [found for part in content if (found := _part(part)) is not None]
            opaque = any(isinstance(part, Opaque) for part in parts)
            return parts if opaque else "\n".join(str(part) for part in parts)
        case _:
            return str(content)


def _part(part: object) -> str | Opaque | None:
    """A part's text; None for a kind that LMDeploy leaves out."""
    if isinstance(part, Opaque):
        return part
    kind = _kind(part)
    if kind in _MULTIMODAL:
        return Opaque(part, "multimodal")
    return str(part.get("text", "")) if isinstance(part, Mapping) and kind == "text" else None


def _with_tool_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if message.get("role") == "assistant" and isinstance(calls, list):
        message["tool_calls"] = [parsed_call(call) for call in calls]
    return message


def _functions(tools: Sequence[Mapping[str, Any]], choice: object) -> list[dict[str, Any]]:
    functions = [
        {
            "description": function.get("description"),
            "name": function.get("name"),
            "parameters": function.get("parameters"),
        }
        for tool in tools
        if isinstance(function := tool.get("function"), Mapping)
    ]
    match choice:
        case {"function": {"name": str(name)}}:
            return [function for function in functions if function["name"] == name]
        case {"allowed_tools": {"tools": list(allowed)}}:
            named = [each.get("function") for each in allowed if isinstance(each, Mapping)]
            names = {function.get("name") for function in named if isinstance(function, Mapping)}
            return [function for function in functions if function["name"] in names]
        case _:
            return functions
