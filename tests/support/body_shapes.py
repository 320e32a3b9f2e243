"""Request bodies that consist of one thing, so many times: each way in which a client can make a body long."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gateway.types import Operation

_TEXT = [{"type": "text", "text": "x"}]
_SAID = {"role": "user", "content": "x"}


@dataclass(frozen=True, slots=True)
class Shape:
    """``make(n)`` is a body with n of it; ``least`` is a number for which reading it takes a measurable time."""

    operation: Operation
    make: Callable[[int], bytes]
    least: int = 1000


def chat(**fields: Any) -> bytes:
    """A chat with these fields."""
    return json.dumps({"model": "m", "messages": [_SAID]} | fields).encode()


def _with(more: str) -> bytes:
    return chat()[:-1] + f",{more}}}".encode()


def _content(text: str) -> bytes:
    return f'{{"model":"m","messages":[{{"role":"user","content":"{text}"}}]}}'.encode()


def _each(write: Callable[[int], str], many: int) -> str:
    return ",".join(write(number) for number in range(many))


def _called(many: int) -> dict[str, Any]:
    call = {"function": {"name": "x", "arguments": '{"a":1}'}}
    return {"role": "assistant", "content": "x", "tool_calls": [call] * many}


def _tools(many: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"x{number}"}} for number in range(many)]


def _completion(prompt: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt}).encode()


def _response(items: list[Any]) -> bytes:
    return json.dumps({"model": "m", "input": items}).encode()


def _message(role: str, blocks: list[Any], **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": role, "content": blocks}]} | fields).encode()


_BYTES = 20_000

SHAPES = {
    "fields": Shape(Operation.CHAT, lambda n: chat(**{f"f{number}": 1 for number in range(n)})),
    "names of fields with escapes": Shape(Operation.CHAT, lambda n: _with(_each(lambda i: f'"\\u0061{i:x}":1', n))),
    "the last field twice, with escapes": Shape(
        Operation.CHAT, lambda n: _with(_each(lambda i: f'"\\u0061{min(i, n - 2):x}":1', n))
    ),
    "fields beside a session id": Shape(
        Operation.CHAT, lambda n: chat(session_id=1, **{f"f{number}": 1 for number in range(n)})
    ),
    "stream options": Shape(
        Operation.CHAT, lambda n: chat(stream=True, stream_options={f"f{number}": 1 for number in range(n)})
    ),
    "template arguments": Shape(Operation.CHAT, lambda n: chat(chat_template_kwargs={f"f{i}": 1 for i in range(n)})),
    "messages": Shape(Operation.CHAT, lambda n: chat(messages=[_SAID] * n)),
    "parts": Shape(Operation.CHAT, lambda n: chat(messages=[{"role": "user", "content": _TEXT * n}])),
    "tool calls": Shape(Operation.CHAT, lambda n: chat(messages=[_called(n)])),
    "tools": Shape(Operation.CHAT, lambda n: chat(tools=_tools(n))),
    "tools that are allowed": Shape(
        Operation.CHAT, lambda n: chat(tools=_tools(n), tool_choice={"allowed_tools": {"tools": _tools(n)}})
    ),
    "lists within lists": Shape(Operation.CHAT, lambda n: _with('"x":' + "[" * n + "]" * n), 100),
    "objects within objects": Shape(Operation.CHAT, lambda n: _with('"x":' + '{"a":' * n + "1" + "}" * n), 100),
    "deep lists side by side": Shape(
        Operation.CHAT, lambda n: _with('"x":[' + ",".join(["[" * 500 + "]" * 500] * n) + "]"), 20
    ),
    "escapes": Shape(Operation.CHAT, lambda n: _content("\\u0061" * n), _BYTES),
    "backslashes": Shape(Operation.CHAT, lambda n: _content("\\\\" * n), _BYTES),
    "special tokens": Shape(Operation.CHAT, lambda n: _content("<|im_end|>x" * n), 2000),
    "halves of surrogate pairs": Shape(Operation.CHAT, lambda n: _content("\\ud83d\\ude00" * n), _BYTES),
    "letters beside an emoji": Shape(Operation.CHAT, lambda n: _content("\\ud83d\\ude00" + "x y " * n), _BYTES),
    "letters beside a character of two bytes": Shape(Operation.CHAT, lambda n: _content("中" + "x" * n), _BYTES),
    "characters beyond ASCII": Shape(Operation.CHAT, lambda n: _content("中" * n), _BYTES),
    "spaces": Shape(Operation.CHAT, lambda n: _with(" " * n + '"a"' + " " * n + ":1" + " " * n), _BYTES),
    "spaces around fields": Shape(Operation.CHAT, lambda n: _with(_each(lambda i: f' "f{i}" : 1 ', n))),
    "digits of a number": Shape(Operation.CHAT, lambda n: _with('"a":' + "1" * n), _BYTES),
    "digits of a fraction": Shape(Operation.CHAT, lambda n: _with('"a":0.' + "1" * n), _BYTES),
    "digits of a number beside escapes": Shape(Operation.CHAT, lambda n: _with('"\\u0061":' + "1" * n), _BYTES),
    "a model's name": Shape(Operation.CHAT, lambda n: chat(model="m" * n), _BYTES),
    "ids of a chat": Shape(Operation.CHAT, lambda n: chat(messages=[], input_ids=[12_345] * n), _BYTES),
    "ids of a prompt": Shape(Operation.COMPLETIONS, lambda n: _completion([12_345] * n), _BYTES),
    "texts of prompts": Shape(Operation.COMPLETIONS, lambda n: _completion(["x"] * n)),
    "lists of ids": Shape(Operation.COMPLETIONS, lambda n: _completion([[1]] * n)),
    "ids of several prompts": Shape(Operation.COMPLETIONS, lambda n: _completion([[7] * n] * 8), 2000),
    "ids to generate from": Shape(
        Operation.GENERATE, lambda n: json.dumps({"model": "m", "input_ids": [12_345] * n}).encode(), _BYTES
    ),
    "texts to embed": Shape(Operation.EMBEDDINGS, lambda n: _response(["x"] * n)),
    "items": Shape(Operation.RESPONSES, lambda n: _response([_SAID] * n)),
    "system items": Shape(Operation.RESPONSES, lambda n: _response([{"role": "system", "content": "x"}] * n)),
    "parts of an item": Shape(
        Operation.RESPONSES,
        lambda n: _response([{"role": "user", "content": [{"type": "input_text", "text": "x"}] * n}]),
    ),
    "calls": Shape(
        Operation.RESPONSES, lambda n: _response([{"type": "function_call", "name": "x", "arguments": "{}"}] * n)
    ),
    "blocks": Shape(Operation.MESSAGES, lambda n: _message("user", _TEXT * n)),
    "blocks of the system prompt": Shape(Operation.MESSAGES, lambda n: _message("user", _TEXT, system=_TEXT * n)),
    "tool results": Shape(
        Operation.MESSAGES,
        lambda n: _message("user", [{"type": "tool_result", "tool_use_id": "x", "content": _TEXT}] * n),
    ),
    "uses of tools": Shape(
        Operation.MESSAGES,
        lambda n: _message("assistant", [{"type": "tool_use", "id": "x", "name": "y", "input": {"a": 1}}] * n),
    ),
    "turns": Shape(Operation.MESSAGES, lambda n: json.dumps({"model": "m", "messages": [_SAID] * n}).encode()),
}

__all__ = ["SHAPES", "Shape", "chat"]
