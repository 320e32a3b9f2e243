"""Messages and Responses of a simulated engine: events have a type, and none of them is ``[DONE]``."""

from http import HTTPStatus
from typing import Any, Final

from engines.sim.bodies import MessagesBody
from engines.sim.dialects import Refusal, Served, Stream, data, flat_refusal

_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens"}
_TOLD_AGAIN: Final = (
    "instructions",
    "metadata",
    "max_output_tokens",
    "max_tool_calls",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning",
    "safety_identifier",
    "service_tier",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "truncation",
    "user",
)


class Messages:
    """Anthropic's Messages: a block of text, and events that have a type."""

    prefix = "msg_"

    def whole(self, served: Served, text: str, cached_tokens: int) -> dict[str, Any]:
        """See ``Dialect``."""
        del cached_tokens
        return {
            "id": served.name,
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": text}],
            "model": served.model,
            "stop_reason": _STOP_REASONS[served.reason],
            "stop_sequence": None,
            "usage": {"input_tokens": served.prompt_tokens, "output_tokens": len(served.words)},
            "output_ids": served.words if _wants_ids(served) else None,
            "output_token_logprobs": None,
            "routed_experts": None,
        }

    def stream(self, served: Served) -> Stream:
        """See ``Dialect``."""
        return _MessagesStream(served)

    def refusal(self, why: Refusal) -> dict[str, Any]:
        """See ``Dialect``."""
        kinds = {HTTPStatus.NOT_FOUND: "not_found_error", HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error"}
        other = "api_error" if why.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        return {"type": "error", "error": {"type": kinds.get(why.status, other), "message": str(why)}}


class _MessagesStream:
    def __init__(self, served: Served) -> None:
        self._served = served
        self._wants_ids = _wants_ids(served)

    def begin(self) -> bytes:
        return b""

    def more(self, text: str, done: int, tokens: list[int]) -> bytes:
        begin = self._start(done) if done == len(tokens) else b""
        ids = {"output_ids": tokens} if self._wants_ids else {}
        return begin + _typed("content_block_delta", index=0, delta={"type": "text_delta", "text": text}, **ids)

    def _start(self, done: int) -> bytes:
        served = self._served
        message: dict[str, Any] = {
            "id": served.name,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": served.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": served.prompt_tokens, "output_tokens": done},
        }
        block = {"type": "text", "text": ""}
        return _typed("message_start", message=message) + _typed("content_block_start", index=0, content_block=block)

    def end(self, cached_tokens: int) -> bytes:
        del cached_tokens
        reason = {"stop_reason": _STOP_REASONS[self._served.reason], "stop_sequence": None}
        usage = {"output_tokens": len(self._served.words)}
        last = b""
        if self._wants_ids:  # the engine's last event has no tokens, and only who asks for ids is told of it
            last = _typed("content_block_delta", index=0, delta={"type": "text_delta", "text": ""}, output_ids=[])
        return (
            last
            + _typed("content_block_stop", index=0)
            + _typed("message_delta", delta=reason, usage=usage)
            + _typed("message_stop")
        )


class Responses:
    """OpenAI's Responses: one message; events are numbered and have a type."""

    prefix = "resp_"

    def whole(self, served: Served, text: str, cached_tokens: int) -> dict[str, Any]:
        """See ``Dialect``."""
        del cached_tokens
        cut = served.reason == "length"
        said = self.begun(served) | {
            "status": "incomplete" if cut else "completed",
            "output": [self.item(served, text)],
            "output_text": text,
            "usage": {
                "input_tokens": served.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": 0,
                    "cache_write_tokens": 0,
                    "input_tokens_per_turn": [],
                    "cached_tokens_per_turn": [],
                },
                "output_tokens": len(served.words),
                "output_tokens_details": {
                    "reasoning_tokens": 0,
                    "tool_output_tokens": 0,
                    "output_tokens_per_turn": [],
                    "tool_output_tokens_per_turn": [],
                },
                "total_tokens": served.prompt_tokens + len(served.words),
            },
        }
        return said | ({"incomplete_details": {"reason": "max_output_tokens"}} if cut else {})

    def stream(self, served: Served) -> Stream:
        """See ``Dialect``."""
        return _ResponsesStream(self, served)

    def refusal(self, why: Refusal) -> dict[str, Any]:
        """See ``Dialect``."""
        flat = flat_refusal(why)
        return {"error": {name: flat[name] for name in ("message", "type", "param", "code")}}

    def begun(self, served: Served) -> dict[str, Any]:
        """Return a response of which there is nothing yet."""
        told = {name: getattr(served.asked, name, None) for name in _TOLD_AGAIN}
        return {
            "id": served.name,
            "object": "response",
            "created_at": served.created,
            "model": served.model,
            "status": "in_progress",
            "output": [],
            "output_text": "",
            "background": False,
            "store": False,
        } | {name: value for name, value in told.items() if value is not None}

    def item(self, served: Served, text: str) -> dict[str, Any]:
        """Return the message."""
        return {
            "id": _message_name(served),
            "type": "message",
            "role": "assistant",
            "status": "incomplete" if served.reason == "length" else "completed",
            "content": [_output_text(text)],
        }


class _ResponsesStream:
    def __init__(self, dialect: Responses, served: Served) -> None:
        self._dialect = dialect
        self._served = served
        self._number = 0
        self._text: list[str] = []
        self._item = {"response_id": served.name, "output_index": 0}
        self._part = {**self._item, "item_id": _message_name(served), "content_index": 0}

    def begin(self) -> bytes:
        begun = self._dialect.begun(self._served)
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def more(self, text: str, done: int, tokens: list[int]) -> bytes:
        item = self._start() if done == len(tokens) else b""
        self._text.append(text)
        return item + self._event("response.output_text.delta", **self._part, delta=text)

    def _start(self) -> bytes:
        item = {"id": self._part["item_id"], "type": "message", "role": "assistant", "status": "in_progress"}
        return self._event("response.output_item.added", **self._item, item=item | {"content": []}) + self._event(
            "response.content_part.added", **self._part, part=_output_text("")
        )

    def end(self, cached_tokens: int) -> bytes:
        text = "".join(self._text)
        whole = self._dialect.whole(self._served, text, cached_tokens)
        return (
            self._event("response.output_text.done", **self._part, text=text)
            + self._event("response.content_part.done", **self._part, part=_output_text(text))
            + self._event("response.output_item.done", **self._item, item=whole["output"][0])
            + self._event(f"response.{whole['status']}", response=whole)
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return _typed(kind, sequence_number=self._number - 1, **fields)


def _wants_ids(served: Served) -> bool:
    return isinstance(served.asked, MessagesBody) and bool(served.asked.return_token_ids)


def _message_name(served: Served) -> str:
    return f"msg_{served.name.removeprefix(Responses.prefix)}"


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _typed(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\n" + data({"type": kind, **fields})


__all__ = ["Messages", "Responses"]
