"""Messages and Responses of a simulated engine: events have a type, and none of them is ``[DONE]``."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final

from engines.sim.bodies import MessagesBody
from engines.sim.dialects import Refusal, Served, Stream, WholeAnswer, data, flat_refusal

_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens"}
_ECHOED: Final = (
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

    def whole(self, answers: Sequence[WholeAnswer]) -> dict[str, Any]:
        """See ``Dialect``."""
        [(served, text, _)] = answers
        return {
            "id": served.name,
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": text}],
            "model": served.model,
            "stop_reason": _STOP_REASONS[served.reason],
            "stop_sequence": None,
            "usage": {"input_tokens": served.prompt_tokens, "output_tokens": served.tokens},
            "output_ids": [*served.words, *served.last] if _wants_ids(served) else None,
            "output_token_logprobs": None,
            "routed_experts": None,
        }

    def stream(self, served: Served) -> Stream:
        """See ``Dialect``."""
        return _MessagesStream(served)

    def over(self, answers: Sequence[WholeAnswer]) -> bytes:
        """See ``Dialect``."""
        del answers
        return b""

    def refusal(self, why: Refusal) -> dict[str, Any]:
        """See ``Dialect``."""
        kinds = {HTTPStatus.NOT_FOUND: "not_found_error", HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error"}
        other = "api_error" if why.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        return {"type": "error", "error": {"type": kinds.get(why.status, other), "message": str(why)}}


class _MessagesStream:
    """The block of text begins with the first text; without any, with the first ids where they are told."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._wants_ids = _wants_ids(served)
        self._has_begun = self._has_block = False

    def begin(self) -> bytes:
        return b""

    def more(self, text: str, done: int, tokens: list[int]) -> bytes:
        begin = b""
        if not self._has_begun:
            begin, self._has_begun = self._start(done), True
        elif not tokens:
            return b""
        return begin + self._delta(text, tokens)

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
        return _typed("message_start", message=message)

    def _delta(self, text: str, tokens: list[int]) -> bytes:
        if not (text or self._wants_ids):
            return b""
        begin = b""
        if not self._has_block:
            begin = _typed("content_block_start", index=0, content_block={"type": "text", "text": ""})
            self._has_block = True
        ids = {"output_ids": tokens} if self._wants_ids else {}
        return begin + _typed("content_block_delta", index=0, delta={"type": "text_delta", "text": text}, **ids)

    def end(self) -> bytes:
        served = self._served
        last = self._delta(served.last_text, served.last)
        return (
            last
            + (_typed("content_block_stop", index=0) if self._has_block else b"")
            + _typed(
                "message_delta",
                delta={"stop_reason": _STOP_REASONS[served.reason], "stop_sequence": None},
                usage={"output_tokens": served.tokens},
            )
            + _typed("message_stop")
        )


class Responses:
    """OpenAI's Responses: one message; events are numbered and have a type."""

    prefix = "resp_"

    def whole(self, answers: Sequence[WholeAnswer]) -> dict[str, Any]:
        """See ``Dialect``."""
        [(served, text, _)] = answers
        cut = served.reason == "length"
        body = self.begun(served) | {
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
                "output_tokens": served.tokens,
                "output_tokens_details": {
                    "reasoning_tokens": 0,
                    "tool_output_tokens": 0,
                    "output_tokens_per_turn": [],
                    "tool_output_tokens_per_turn": [],
                },
                "total_tokens": served.prompt_tokens + served.tokens,
            },
        }
        return body | ({"incomplete_details": {"reason": "max_output_tokens"}} if cut else {})

    def stream(self, served: Served) -> Stream:
        """See ``Dialect``."""
        return _ResponsesStream(self, served)

    def over(self, answers: Sequence[WholeAnswer]) -> bytes:
        """See ``Dialect``."""
        del answers
        return b""

    def refusal(self, why: Refusal) -> dict[str, Any]:
        """See ``Dialect``."""
        flat = flat_refusal(why)
        return {"error": {name: flat[name] for name in ("message", "type", "param", "code")}}

    def begun(self, served: Served) -> dict[str, Any]:
        """Return a response of which there is nothing yet."""
        answers = {name: getattr(served.request, name, None) for name in _ECHOED}
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
        } | {name: value for name, value in answers.items() if value is not None}

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
        del done, tokens
        return self._delta(text)

    def _delta(self, text: str) -> bytes:
        if not text:
            return b""
        item = b"" if self._text else self._start()
        self._text.append(text)
        return item + self._event("response.output_text.delta", **self._part, delta=text)

    def _start(self) -> bytes:
        item = {"id": self._part["item_id"], "type": "message", "role": "assistant", "status": "in_progress"}
        return self._event("response.output_item.added", **self._item, item=item | {"content": []}) + self._event(
            "response.content_part.added", **self._part, part=_output_text("")
        )

    def end(self) -> bytes:
        last = self._delta(self._served.last_text)
        if not self._text:
            last = self._start()
        text = "".join(self._text)
        whole = self._dialect.whole([WholeAnswer(self._served, text, 0)])
        return (
            last
            + self._event("response.output_text.done", **self._part, text=text)
            + self._event("response.content_part.done", **self._part, part=_output_text(text))
            + self._event("response.output_item.done", **self._item, item=whole["output"][0])
            + self._event(f"response.{whole['status']}", response=whole)
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return _typed(kind, sequence_number=self._number - 1, **fields)


def _wants_ids(served: Served) -> bool:
    return isinstance(served.request, MessagesBody) and bool(served.request.return_token_ids)


def _message_name(served: Served) -> str:
    return f"msg_{served.name.removeprefix(Responses.prefix)}"


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _typed(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\n" + data({"type": kind, **fields})
