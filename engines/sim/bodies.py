"""What clients ask a simulated engine for: the fields that matter to it, and OpenAI's answers."""

from typing import Annotated, Any

import msgspec

MOST_TOKENS = 1 << 20
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``include_usage``: one more event before the last has the usage."""

    include_usage: bool = False


class _Asked(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    max_tokens: _Tokens | None = None
    max_completion_tokens: _Tokens | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=1)] | None = 1

    @property
    def most_tokens(self) -> int | None:
        """How long the answer may be, None where the client doesn't say."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def usage_in_stream(self) -> bool:
        """Whether a stream is to tell its usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatBody(_Asked, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None


class CompletionBody(_Asked, frozen=True, kw_only=True):
    """``POST /v1/completions``: one prompt, as text or as tokens."""

    prompt: str | Annotated[list[int], msgspec.Meta(min_length=1)]


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer came to."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def said(self) -> dict[str, Any]:
        """Return it as clients read it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Dialect:
    """The two routes' ways to say the same: names of objects, and where the text stands."""

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat
        self.prefix = "chatcmpl" if chat else "cmpl"
        self.whole = "chat.completion" if chat else "text_completion"
        self.chunk = "chat.completion.chunk" if chat else "text_completion"

    def choice(self, text: str, reason: str | None, *, chunk: bool, first: bool = False) -> dict[str, Any]:
        """Return a choice with all of its text, or with what a chunk adds."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
        if not self._chat:
            return choice | {"text": text}
        said = {"content": text} | ({"role": "assistant"} if first or not chunk else {})
        return choice | {"delta" if chunk else "message": said}


__all__ = ["MOST_TOKENS", "ChatBody", "CompletionBody", "Dialect", "StreamOptions", "Usage"]
