"""Anthropic's messages and the items of OpenAI's Responses as messages of a chat, as LMDeploy 0.18 reads them.

Only what becomes text: other parts are left for the tokenizer to refuse.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from engines.sim.bodies import ChatBody, CountBody, MessagesBody, ResponsesBody
from engines.sim.sampling import Named, ToolChoice
from engines.sim.text import TextError
from kvcontrol.tokenization.chat_template import merged_system

Chat = list[dict[str, Any]]
Spoken = ChatBody | MessagesBody | CountBody | ResponsesBody
_TEXT_PARTS: Final = frozenset({"input_text", "output_text", "text"})
_BLOCK_FIELDS: Final = ("type", "text", "thinking", "id", "name", "input", "tool_use_id", "content", "is_error")
_BILLING: Final = "x-anthropic-billing-header"


def chat_of(body: Spoken, *, merge: bool) -> tuple[Chat, dict[str, Any]]:
    """Return what the chat template is given: the messages, and its other arguments."""
    match body:
        case ChatBody():
            kwargs = dict(body.chat_template_kwargs or {})
            if body.enable_thinking is not None:
                kwargs.setdefault("enable_thinking", body.enable_thinking)
            return body.messages, kwargs | {"tools": _functions(body) or None}
        case MessagesBody():
            return _of_messages(body, merge=merge), {"tools": _functions(body) or None}
        case CountBody():
            return _counted(body, merge=merge), {}
        case ResponsesBody():
            return _of_responses(body), {"tools": _functions(body) or None}


def _of_messages(body: MessagesBody, *, merge: bool) -> Chat:
    """Return the chat that is answered; with ``merge`` all system messages are one, at the front."""
    chat = _system(body.system)
    for message in body.messages or ():
        if message.role == "system":
            chat += _system(message.content)
        elif isinstance(message.content, str):
            chat.append({"role": message.role, "content": message.content})
        else:
            chat += _blocks(message.role, message.content)
    return merged_system(chat) if merge else chat


def _counted(body: CountBody, *, merge: bool) -> Chat:
    """Return the chat whose tokens are counted: tools' calls and results are marked text in it."""
    chat = _system(body.system)
    for message in body.messages:
        if message.role == "system":
            chat += _system(message.content)
        else:
            content = message.content
            chat.append({"role": message.role, "content": content if isinstance(content, str) else _flat(content)})
    return merged_system(chat) if merge else chat


def _of_responses(body: ResponsesBody) -> Chat:
    """Return the chat: instructions and system items are one message, joined by blank lines."""
    system = [body.instructions] if body.instructions else []
    chat: Chat = []
    if isinstance(body.input, str):
        chat.append({"role": "user", "content": body.input})
    else:
        for number, item in enumerate(body.input or ()):
            message = _item(item, number)
            if message["role"] == "system":
                system.append(message["content"])
            else:
                chat.append(message)
    return [{"role": "system", "content": "\n\n".join(system)}, *chat] if system else chat


def _functions(body: ChatBody | MessagesBody | ResponsesBody) -> list[dict[str, Any]]:
    """Return the tools as the template is given them: those that may be called."""
    match body:
        case ChatBody():
            made = [msgspec.structs.asdict(each.function) for each in body.tools or ()]
        case MessagesBody():
            made = [_function(each, "input_schema") for each in body.tools or ()]
        case _:
            tools = () if body.tool_choice == "none" else body.tools
            made = [_function(each, "parameters") for each in tools if each.get("type") == "function"]
    match body.tool_choice:
        case ToolChoice(function=Named(name=name)):
            return [each for each in made if each["name"] == name]
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return [each for each in made if each["name"] == name]
    return made


def _function(tool: Mapping[str, Any], parameters: str) -> dict[str, Any]:
    return {"description": tool.get("description"), "name": tool.get("name"), "parameters": tool.get(parameters)}


def _system(entry: str | Sequence[Mapping[str, Any]] | None) -> Chat:
    if not isinstance(entry, str):
        texts = [str(block.get("text") or "") for block in entry or () if block.get("type") == "text"]
        entry = "".join(text for text in texts if not text.startswith(_BILLING))
    return [{"role": "system", "content": entry}] if entry else []


def _blocks(role: str, blocks: Sequence[Mapping[str, Any]]) -> Chat:
    """A message's blocks; results of tools come before it."""
    results: Chat = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in blocks:
        match block:
            case {"type": "tool_use"}:
                function = {"name": block.get("name") or "", "arguments": json.dumps(block.get("input") or {})}
                calls.append({"id": block.get("id") or "", "type": "function", "function": function})
            case {"type": "tool_result"} if role == "user":
                results.append(_result(block))
            case {"type": "thinking" | "redacted_thinking"}:
                thoughts.append(str(block.get("thinking") or ""))
            case _:
                parts += _part(block)
    entry: dict[str, Any] = {"role": role}
    if any(thoughts):
        entry["reasoning_content"] = "".join(thoughts)
    if calls:
        entry["tool_calls"] = calls
    if parts:
        alone = len(parts) == 1 and parts[0]["type"] == "text"
        entry["content"] = parts[0]["text"] if alone else parts
    return [*results, entry] if len(entry) > 1 else results


def _part(block: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a block adds to its message's content; nothing for an empty text."""
    match block:
        case {"type": "text"}:
            text = block.get("text")
        case {"type": "image"}:
            return [{"type": "image_url"}]
        case {"type": "tool_result"}:
            text = f"Tool result: {_flat_content(block.get('content'))}"
        case _:
            text = _json(_whole(block))
    return [{"type": "text", "text": text}] if text else []


def _result(block: Mapping[str, Any]) -> dict[str, Any]:
    content = block.get("content")
    if isinstance(content, list):
        if any(_kind(each) == "image" for each in content):
            raise TextError("a tool's result has an image; a simulated engine reads text alone")
        content = "\n".join(str(each.get("text", "")) for each in content if _kind(each) == "text")
    identity = block.get("tool_use_id") or block.get("id") or ""
    return {"role": "tool", "tool_call_id": identity, "content": content if isinstance(content, str) else ""}


def _flat(blocks: Sequence[Any]) -> str:
    return "".join(_flat_block(block) for block in blocks)


def _flat_block(block: Any) -> str:
    match block:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "text"}:
            raise TextError("Missing `text` in a content block.")
        case {"type": "tool_result", **rest}:
            return (
                f"\n[tool_result id={rest.get('tool_use_id') or ''}]\n{_flat_content(rest.get('content'))}\n"
                "[/tool_result]\n"
            )
        case {"type": "tool_use", **rest}:
            return f"\n[tool_use name={rest.get('name') or ''}]\n{_json(rest.get('input'))}\n[/tool_use]\n"
        case {"type": "thinking" | "redacted_thinking", **rest}:
            return f"\n[thinking]\n{rest['thinking']}\n[/thinking]\n" if rest.get("thinking") else ""
        case {"type": str(kind)}:
            return f"\n[{kind}]\n{_json(_whole(block))}\n[/{kind}]\n"
    raise TextError("a content block has no type")


def _flat_content(content: Any) -> str:
    return _flat(content) if isinstance(content, list) else _json(content)


def _json(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _whole(block: Mapping[str, Any]) -> dict[str, Any]:
    """A block with all fields that LMDeploy knows, as it writes it out."""
    return {name: block.get(name) for name in _BLOCK_FIELDS} | dict(block)


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, Mapping) else None


def _item(item: Mapping[str, Any], number: int) -> dict[str, Any]:
    """One item of a Responses input."""
    match item.get("type", "message"):
        case "function_call":
            identity, name = item.get("call_id") or item.get("id"), item.get("name")
            if not identity or not name:
                raise TextError(f"Missing `call_id` or `name` in function_call item at index {number}.")
            call = {"name": name, "arguments": item.get("arguments") or ""}
            calls = [{"id": identity, "type": "function", "function": call}]
            return {"role": "assistant", "content": None, "tool_calls": calls}
        case "function_call_output":
            if not item.get("call_id"):
                raise TextError(f"Missing `call_id` in function_call_output item at index {number}.")
            text = "".join(_texts(item.get("output", ""), f"input[{number}].output"))
            return {"role": "tool", "tool_call_id": item["call_id"], "content": text}
        case "message":
            role = "system" if item.get("role") == "developer" else item.get("role")
            if role not in ("system", "user", "assistant"):  # no set: it may be a list
                raise TextError(f"Unsupported Responses message role at index {number}: {role!r}.")
            return {"role": role, "content": "".join(_texts(item.get("content", ""), f"input[{number}].content"))}
        case kind:
            raise TextError(f"Unsupported Responses input item type: {kind!r}.")


def _texts(content: Any, field: str) -> Iterator[str]:
    if isinstance(content, str):
        yield content
        return
    if not isinstance(content, list):
        raise TextError(f"Unsupported `{field}` content. Expected string or text content parts.")
    for number, part in enumerate(content):
        match part:
            case {"type": str(kind), "text": str(text)} if kind in _TEXT_PARTS:
                yield text
            case {"type": kind} if not (isinstance(kind, str) and kind in _TEXT_PARTS):
                raise TextError(f"Unsupported Responses input content part type: {kind!r}.")
            case _:
                raise TextError(f"Missing `text` in `{field}` content part at index {number}.")
