"""Anthropic's bodies: messages and the count of their tokens."""

from typing import Annotated, Any, Literal

import msgspec

from engines.sim.bodies.refusals import NO_EXPERTS, NO_IMAGES, NotServedError
from engines.sim.bodies.stops import stop_words
from engines.sim.endings import Ending
from engines.sim.sampling import Count, Share

_Tokens = Annotated[int, msgspec.Meta(ge=1)]
_Blocks = str | list[dict[str, Any]]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One of Anthropic's messages."""

    role: Literal["user", "assistant", "system"]
    content: _Blocks


class _Spoken(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    system: _Blocks | None = None


class MessagesBody(_Spoken, frozen=True, kw_only=True):
    """``POST /v1/messages``."""

    max_tokens: _Tokens
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    stop_sequences: list[str] | None = None
    include_stop_str_in_output: bool | None = False
    stream: bool = False
    input_ids: list[int] | None = None
    image_data: Any = None
    return_token_ids: bool | None = False
    return_logprob: bool | None = False
    return_routed_experts: bool | None = False
    temperature: Share | None = None
    top_p: Share | None = None
    top_k: Count | None = None

    @property
    def ending(self) -> Ending:
        """Where the answer ends."""
        return Ending(
            most_tokens=self.max_tokens,
            stop=stop_words(self.stop_sequences),
            shows_stop=bool(self.include_stop_str_in_output),
        )

    def check(self) -> None:
        """Raise ``NotServedError`` for what isn't served."""
        if self.return_logprob:
            raise NotServedError(
                f"return_logprob={self.return_logprob} was requested, but logprobs_mode is not enabled in the engine"
                " configuration."
            )
        if self.return_routed_experts:
            raise NotServedError(NO_EXPERTS)
        if self.messages:
            for name in ("input_ids", "image_data"):
                if getattr(self, name) is not None:
                    raise NotServedError(f"{name} cannot be used when messages is non-empty.")
        else:
            self._check_tokens()

    def _check_tokens(self) -> None:
        if self.input_ids is None:
            raise NotServedError("messages must not be empty unless input_ids is set.")
        if not self.input_ids:
            raise NotServedError("input_ids must not be an empty list.")
        for name in ("system", "tools"):
            if getattr(self, name):
                raise NotServedError(
                    f"{name} cannot be used when input_ids is set because raw input_ids bypass message rendering."
                )
        if self.image_data is not None:
            raise NotServedError(NO_IMAGES)


class CountBody(_Spoken, frozen=True, kw_only=True):
    """``POST /v1/messages/count_tokens``: tools aren't counted."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]

    def check(self) -> None:
        """All of it is served."""
