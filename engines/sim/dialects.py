"""How answers and refusals are told: the shapes of LMDeploy 0.18's routes, whole and streamed.

As with LMDeploy only chat tells what was cached: completions, Messages and ``/generate`` have no field for it, or leave
it empty, and Responses always says 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from engines.sim.bodies import ChatBody, CompletionBody, Generated

_DONE: Final = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One answer's constants. ``words`` are told as they come; ``last``, with the end, a token that ended it."""

    name: str
    request: Generated
    model: str
    prompt_tokens: int
    words: list[int]
    reason: str
    created: int
    index: int = 0
    last: list[int] = field(default_factory=list)
    last_text: str = ""

    @property
    def tokens(self) -> int:
        """How many it has."""
        return len(self.words) + len(self.last)


class WholeAnswer(NamedTuple):
    """A whole answer."""

    served: Served
    text: str
    cached_tokens: int


class Refusal(Protocol):
    """Why a request isn't answered."""

    status: HTTPStatus
    param: str | None


class Stream(Protocol):
    """One streamed answer."""

    def begin(self) -> bytes:
        """Return what comes before the first token, at once."""

    def more(self, text: str, done: int, tokens: list[int]) -> bytes:
        """Return the events of ``tokens``, with which there are ``done`` in all; none came with the token of the end
        when that isn't told.
        """

    def end(self) -> bytes:
        """Return what follows the last token."""


class Dialect(Protocol):
    """A route's way to say things; ``prefix`` begins the names of its answers."""

    prefix: str

    def whole(self, answers: Sequence[WholeAnswer]) -> dict[str, Any]:
        """Return answers that aren't streamed; chat and completions alone may have more than one."""

    def stream(self, served: Served) -> Stream:
        """Return what tells an answer as it comes."""

    def over(self, answers: Sequence[WholeAnswer]) -> bytes:
        """Return what follows the last of the streamed answers, whose texts may be left out."""

    def refusal(self, why: Refusal) -> dict[str, Any]:
        """Return the body of an error."""


class OpenAi:
    """Chat and completions: names of objects, and where the text stands."""

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat
        self.prefix = "chatcmpl-" if chat else "cmpl-"
        self._whole = "chat.completion" if chat else "text_completion"
        self._chunk = "chat.completion.chunk" if chat else "text_completion"

    def whole(self, answers: Sequence[WholeAnswer]) -> dict[str, Any]:
        """See ``Dialect``."""
        usage = self._usage(answers) | {"completion_tokens_details": None}
        body = _head(answers[0].served, self._whole) | {
            "choices": [self._choice(each) for each in answers],
            "usage": usage,
        }
        return body | ({"service_tier": None} if self._chat else {})

    def _choice(self, answers: WholeAnswer) -> dict[str, Any]:
        served = answers.served
        choice: dict[str, Any] = {"index": served.index, "logprobs": None, "finish_reason": served.reason}
        if not self._chat:
            return choice | {"text": answers.text}
        message = {
            "role": "assistant",
            "content": answers.text or None,
            "reasoning_content": None,
            "tool_calls": None,
        }
        ids = [*served.words, *served.last] if _wants_ids(served) else None
        return choice | {"message": message, "output_token_logprobs": None, "output_ids": ids, "routed_experts": None}

    def _usage(self, answers: Sequence[WholeAnswer]) -> dict[str, Any]:
        """What answers came to together: choices of a chat have one prompt."""
        prompts = answers[:1] if self._chat else answers
        prompt_tokens = sum(each.served.prompt_tokens for each in prompts)
        tokens = sum(each.served.tokens for each in answers)
        cached = {"cached_tokens": answers[0].cached_tokens} if self._chat else None
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + tokens,
            "completion_tokens": tokens,
            "prompt_tokens_details": cached,
        }

    def stream(self, served: Served) -> Stream:
        """See ``Dialect``."""
        return _OpenAiStream(served, _head(served, self._chunk), chat=self._chat)

    def over(self, answers: Sequence[WholeAnswer]) -> bytes:
        """See ``Dialect``."""
        served = answers[0].served
        if not _reports_usage(served):
            return _DONE
        usage = self._usage(answers)
        if len(answers) > 1 and self._chat:
            usage["completion_tokens_details"] = None
        if not self._chat:
            del usage["prompt_tokens_details"]
        return data(_head(served, self._chunk) | {"choices": [], "usage": usage}) + _DONE

    def refusal(self, why: Refusal) -> dict[str, Any]:
        """See ``Dialect``."""
        return flat_refusal(why)


class _OpenAiStream:
    """An event for what came at once, and an empty one with the reason for the end."""

    def __init__(self, served: Served, head: dict[str, Any], *, chat: bool) -> None:
        self._served = served
        self._head = head | ({"usage": None} if _reports_usage(served) else {})
        self._chat = chat
        self._wants_ids = _wants_ids(served)

    def begin(self) -> bytes:
        return b""

    def more(self, text: str, done: int, tokens: list[int]) -> bytes:
        if self._chat and not tokens and done:
            return b""
        return self._event(text, tokens)

    def end(self) -> bytes:
        served = self._served
        return self._event(served.last_text, served.last, finish_reason=served.reason)

    def _event(self, text: str, tokens: list[int], **more: str) -> bytes:
        choice: dict[str, Any] = {"index": self._served.index, **more}
        choice |= {"delta": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        if self._wants_ids:
            choice["output_ids"] = tokens
        return data(self._head | {"choices": [choice]})


class Generate:
    """``/generate``: an event for every token, and an empty one with the reason for the end."""

    prefix = ""

    def whole(self, answers: Sequence[WholeAnswer]) -> dict[str, Any]:
        """See ``Dialect``."""
        [(served, text, _)] = answers
        return self.body(served, text, [*served.words, *served.last], served.tokens, served.reason)

    def stream(self, served: Served) -> Stream:
        """See ``Dialect``."""
        return _GenerateStream(self, served)

    def over(self, answers: Sequence[WholeAnswer]) -> bytes:
        """See ``Dialect``."""
        del answers
        return _DONE

    def refusal(self, why: Refusal) -> dict[str, Any]:
        """See ``Dialect``."""
        return flat_refusal(why)

    def body(self, served: Served, text: str, tokens: list[int], done: int, reason: str | None) -> dict[str, Any]:
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
        return data(self._dialect.body(self._served, text, tokens, done, None))

    def end(self) -> bytes:
        served = self._served
        return data(self._dialect.body(served, served.last_text, served.last, served.tokens, served.reason))


def _head(served: Served, kind: str) -> dict[str, Any]:
    return {"id": served.name, "object": kind, "created": served.created, "model": served.model}


def _wants_ids(served: Served) -> bool:
    return isinstance(served.request, ChatBody) and bool(served.request.return_token_ids)


def _reports_usage(served: Served) -> bool:
    return isinstance(served.request, ChatBody | CompletionBody) and served.request.usage_in_stream


def flat_refusal(why: Refusal) -> dict[str, Any]:
    """Return an error as most routes tell it."""
    kind = "server_error" if why.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    kind = "not_found_error" if why.status == HTTPStatus.NOT_FOUND else kind
    return {"message": str(why), "type": kind, "code": int(why.status), "param": why.param, "object": "error"}


def data(body: dict[str, Any]) -> bytes:
    """Return an event without a type."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
