"""How answers and refusals are told: the shapes of LMDeploy 0.18's routes, whole and streamed.

As with LMDeploy only chat and completions tell what was cached: Messages and ``/generate`` have no field for it, and
Responses always says 0.
"""

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Protocol

import msgspec

from engines.sim.bodies import ChatBody, CompletionBody, Generated

_DONE: Final = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One request's constants."""

    name: str
    asked: Generated
    model: str
    prompt_tokens: int
    words: list[int]
    reason: str
    created: int


class Refusal(Protocol):
    """Why a request isn't answered."""

    status: HTTPStatus
    param: str | None


class Stream(Protocol):
    """One streamed answer."""

    def begin(self) -> bytes:
        """Return what comes before the first token, at once."""

    def more(self, text: str, done: int, tokens: list[int]) -> bytes:
        """Return the events of ``tokens``, with which there are ``done`` in all."""

    def end(self, cached_tokens: int) -> bytes:
        """Return what follows the last token."""


class Dialect(Protocol):
    """A route's way to say things; ``prefix`` begins the names of its answers."""

    prefix: str

    def whole(self, served: Served, text: str, cached_tokens: int) -> dict[str, Any]:
        """Return an answer that isn't streamed."""

    def stream(self, served: Served) -> Stream:
        """Return what tells an answer as it comes."""

    def refusal(self, why: Refusal) -> dict[str, Any]:
        """Return the body of an error."""


class OpenAi:
    """Chat and completions: names of objects, and where the text stands."""

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat
        self.prefix = "chatcmpl-" if chat else "cmpl-"
        self._whole = "chat.completion" if chat else "text_completion"
        self._chunk = "chat.completion.chunk" if chat else "text_completion"

    def whole(self, served: Served, text: str, cached_tokens: int) -> dict[str, Any]:
        """See ``Dialect``."""
        choice = self.choice(text, served.reason, chunk=False)
        return _head(served, self._whole) | {"choices": [choice], "usage": _usage(served, cached_tokens)}

    def stream(self, served: Served) -> Stream:
        """See ``Dialect``."""
        return _OpenAiStream(self, served, self._chunk)

    def refusal(self, why: Refusal) -> dict[str, Any]:
        """See ``Dialect``."""
        return flat_refusal(why)

    def choice(self, text: str, reason: str | None, *, chunk: bool, first: bool = False) -> dict[str, Any]:
        """Return a choice with all of its text, or with what a chunk adds."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
        if not self._chat:
            return choice | {"text": text}
        said = {"content": text} | ({"role": "assistant"} if first or not chunk else {})
        return choice | {"delta" if chunk else "message": said}


class _OpenAiStream:
    def __init__(self, dialect: OpenAi, served: Served, kind: str) -> None:
        self._dialect = dialect
        self._served = served
        self._head = _head(served, kind)

    def begin(self) -> bytes:
        return b""

    def more(self, text: str, done: int, tokens: list[int]) -> bytes:
        served = self._served
        reason = served.reason if done >= len(served.words) else None
        choice = self._dialect.choice(text, reason, chunk=True, first=done == len(tokens))
        return data(self._head | {"choices": [choice]})

    def end(self, cached_tokens: int) -> bytes:
        asked = self._served.asked
        if isinstance(asked, ChatBody | CompletionBody) and asked.usage_in_stream:
            return data(self._head | {"choices": [], "usage": _usage(self._served, cached_tokens)}) + _DONE
        return _DONE


class Generate:
    """``/generate``: an event for every token, and an empty one with the reason for the end."""

    prefix = ""

    def whole(self, served: Served, text: str, cached_tokens: int) -> dict[str, Any]:
        """See ``Dialect``."""
        del cached_tokens
        return self.said(served, text, served.words, len(served.words), served.reason)

    def stream(self, served: Served) -> Stream:
        """See ``Dialect``."""
        return _GenerateStream(self, served)

    def refusal(self, why: Refusal) -> dict[str, Any]:
        """See ``Dialect``."""
        return flat_refusal(why)

    def said(self, served: Served, text: str, tokens: list[int], done: int, reason: str | None) -> dict[str, Any]:
        """Return an answer, or what an event adds to it."""
        meta = {
            "prompt_tokens": served.prompt_tokens,
            "completion_tokens": done,
            "finish_reason": None if reason is None else {"type": reason},
            "output_token_logprobs": None,
            "input_token_logprobs": None,
            "output_top_logprobs": None,
            "input_top_logprobs": None,
            "routed_experts": None,
        }
        return {"text": text, "output_ids": tokens, "meta_info": meta}


class _GenerateStream:
    def __init__(self, dialect: Generate, served: Served) -> None:
        self._dialect = dialect
        self._served = served

    def begin(self) -> bytes:
        return b""

    def more(self, text: str, done: int, tokens: list[int]) -> bytes:
        return data(self._dialect.said(self._served, text, tokens, done, None))

    def end(self, cached_tokens: int) -> bytes:
        del cached_tokens
        served = self._served
        return data(self._dialect.said(served, "", [], len(served.words), served.reason)) + _DONE


def _head(served: Served, kind: str) -> dict[str, Any]:
    return {"id": served.name, "object": kind, "created": served.created, "model": served.model}


def _usage(served: Served, cached_tokens: int) -> dict[str, Any]:
    """What an answer came to, as OpenAI tells it."""
    return {
        "prompt_tokens": served.prompt_tokens,
        "completion_tokens": len(served.words),
        "total_tokens": served.prompt_tokens + len(served.words),
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def flat_refusal(why: Refusal) -> dict[str, Any]:
    """Return an error as most routes tell it."""
    kind = "server_error" if why.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    kind = "not_found_error" if why.status == HTTPStatus.NOT_FOUND else kind
    return {"message": str(why), "type": kind, "code": int(why.status), "param": why.param, "object": "error"}


def data(said: dict[str, Any]) -> bytes:
    """Return an event without a type."""
    return b"data: " + msgspec.json.encode(said) + b"\n\n"


__all__ = ["Dialect", "Generate", "OpenAi", "Refusal", "Served", "Stream", "data", "flat_refusal"]
