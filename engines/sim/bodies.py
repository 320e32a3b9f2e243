"""What clients ask a simulated engine for: of LMDeploy's bodies the fields that matter to it.

It has no probabilities: whoever asks for them is refused as by an LMDeploy that runs without ``--logprobs-mode``.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec

from engines.requests.completions import MOST_ANSWERS, problem_of, prompts_of
from engines.sim.endings import Ending
from engines.sim.sampling import (
    Count,
    Penalised,
    ResponseFormat,
    Sampled,
    SampledResponse,
    Share,
    StreamOptions,
    Tool,
    ToolChoice,
)

GENERATE_TOKENS: Final = 128
"""How long an answer of ``/generate`` is where nobody says."""

_NO_LOGPROBS: Final = "requested but not enabled logprobs_mode in engine configuration"
_NO_EXPERTS: Final = "routed experts requested but not configured in engine configuration."
_UNPREPARED: Final = "Request preprocessing failed."
_NO_IMAGES: Final = "image_data: a simulated engine reads text alone"

_Tokens = Annotated[int, msgspec.Meta(ge=1)]
_Blocks = str | list[dict[str, Any]]
_Stop = str | list[str] | None


class NotServedError(ValueError):
    """A body asks for what isn't served; ``param`` is the field, where the real engine names it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class _Sampled(Penalised, frozen=True, kw_only=True):
    model: str
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    stop: _Stop = None
    ignore_eos: bool | None = False

    @property
    def ending(self) -> Ending:
        """Where the answer ends."""
        return Ending(most_tokens=self.most_tokens, stop=_words(self.stop), ignores_eos=bool(self.ignore_eos))

    @property
    def most_tokens(self) -> int | None:
        """How long the answer may be, None where the client doesn't say."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def usage_in_stream(self) -> bool:
        """Whether a stream is to tell its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatBody(_Sampled, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "required", "none"] | ToolChoice = "auto"
    parallel_tool_calls: bool | None = True
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["low", "medium", "high", "max"] | None = None
    logit_bias: dict[str, float] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    input_ids: list[int] | None = None
    image_data: Any = None
    return_routed_experts: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    return_logprob: bool | None = False
    return_token_ids: bool | None = False
    min_new_tokens: int | None = None
    include_stop_str_in_output: bool | None = False

    @property
    def ending(self) -> Ending:
        """Where the answer ends."""
        return Ending(
            most_tokens=self.most_tokens,
            least_tokens=self.min_new_tokens or 0,
            stop=_words(self.stop),
            ignores_eos=bool(self.ignore_eos),
            shows_stop=bool(self.include_stop_str_in_output),
        )

    @property
    def choices(self) -> int:
        """How many answers are asked for."""
        return 1 if self.n is None else self.n

    def check(self) -> None:
        """Raise ``NotServedError`` for what isn't served."""
        if self.logprobs or (self.top_logprobs or 0) > 0:
            raise NotServedError(f"Logprobs({self.logprobs})/top_logprobs({self.top_logprobs or 0}) {_NO_LOGPROBS}")
        if self.return_logprob:
            raise NotServedError(f"return_logprob({self.return_logprob}) {_NO_LOGPROBS}.")
        if self.choices < 1:
            raise NotServedError(_not_positive("n", self.choices, "int"))
        if self.choices > MOST_ANSWERS:
            raise NotServedError(f"The n {self.choices} exceeds the maximum supported choices ({MOST_ANSWERS}).")
        if self.choices > 1 and self.session_id not in (None, -1):
            raise NotServedError("n > 1 cannot be used with an explicit session_id.")
        for name in ("max_completion_tokens", "max_tokens"):
            most = getattr(self, name)
            if most is not None and most < 1:
                raise NotServedError(_not_positive(name, most, "integer"))
        if self.min_new_tokens is not None and self.min_new_tokens < 0:
            raise NotServedError(f"The min_new_tokens {self.min_new_tokens} cannot be a negative integer.")
        self._check_input()

    def _check_input(self) -> None:
        for name in ("input_ids", "image_data"):
            if getattr(self, name) is not None:
                raise NotServedError(f"{name} cannot be used when messages is non-empty. messages takes priority.")
        if self.tool_choice == "required" and not self.tools:
            raise NotServedError('`tool_choice="required"` requires at least one tool.')
        if self.return_routed_experts:
            raise NotServedError(_NO_EXPERTS)


class CompletionBody(_Sampled, frozen=True, kw_only=True):
    """``POST /v1/completions``: a prompt as text or as tokens, or several. Each has ``n`` answers."""

    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None
    suffix: str | None = None
    echo: bool | None = False

    def check(self) -> None:
        """Raise ``NotServedError`` for what isn't served."""
        if self.n is None:
            raise NotServedError("n is null; leave it out, or give a positive number")
        if isinstance(self.prompt, list) and not self.prompt:
            raise NotServedError("prompt is an empty list; at least one prompt is required")
        if (self.logprobs or 0) > 0:
            raise NotServedError(f"logprobs({self.logprobs}) {_NO_LOGPROBS}.")
        if self.n < 1:
            raise NotServedError(_not_positive("n", self.n, "int"))
        prompts = prompts_of(self.prompt)
        if any(type(each) is not int for ids in prompts if isinstance(ids, list) for each in ids) or any(
            isinstance(each, int) for each in prompts
        ):
            raise NotServedError(_UNPREPARED)
        if problem := problem_of(len(prompts), self.n):
            raise NotServedError(problem)
        if self.most_tokens is not None and self.most_tokens < 1:
            raise NotServedError(f"max_new_tokens must be at least 1, got {self.most_tokens}.")


class GenerateBody(Sampled, frozen=True, kw_only=True):
    """``POST /generate``: LMDeploy's own. It names no model."""

    prompt: str | None = None
    input_ids: list[int] | None = None
    image_data: Any = None
    max_tokens: int = GENERATE_TOKENS
    stop: _Stop = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = False
    include_stop_str_in_output: bool | None = False
    stream: bool | None = False
    return_logprob: bool | None = None
    top_logprobs_num: Count | None = None
    logprob_start_len: Annotated[int, msgspec.Meta(ge=-1)] = -1
    return_routed_experts: bool | None = False
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None

    @property
    def model(self) -> None:
        """The one that is served."""

    @property
    def ending(self) -> Ending:
        """Where the answer ends."""
        return Ending(
            most_tokens=self.max_tokens,
            stop=_words(self.stop),
            stop_ids=tuple(self.stop_token_ids or ()),
            ignores_eos=bool(self.ignore_eos),
            shows_stop=bool(self.include_stop_str_in_output),
        )

    def check(self) -> None:
        """Raise ``NotServedError`` for what isn't served."""
        if (self.top_logprobs_num or 0) > 0 and not self.return_logprob:
            raise NotServedError("top_logprobs_num requires return_logprob=True.")
        if self.return_logprob:
            raise NotServedError(f"return_logprob({self.return_logprob}) {_NO_LOGPROBS}.")
        if self.logprob_start_len >= 0:
            raise NotServedError("logprob_start_len requires return_logprob=True.")
        if self.return_routed_experts:
            raise NotServedError(_NO_EXPERTS)
        if (self.prompt is None) is (self.input_ids is None):
            raise NotServedError("You must specify exactly one of prompt or input_ids")
        if self.prompt == "":
            raise NotServedError("The prompt must not be an empty string")
        if self.input_ids == []:
            raise NotServedError("The input_ids must not be an empty list")
        if self.image_data is not None:
            raise NotServedError(_NO_IMAGES)
        self._check_ending()

    def _check_ending(self) -> None:
        if self.max_tokens < 0:
            raise NotServedError(f"The max_tokens {self.max_tokens} must be non-negative.")
        if not self.max_tokens:
            raise NotServedError(_not_positive("max_tokens", 0, "integer"))
        if isinstance(self.stop, str):  # LMDeploy takes a list alone here
            raise NotServedError(_UNPREPARED)


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
            stop=_words(self.stop_sequences),
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
            raise NotServedError(_NO_EXPERTS)
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
            raise NotServedError(_NO_IMAGES)


class CountBody(_Spoken, frozen=True, kw_only=True):
    """``POST /v1/messages/count_tokens``: tools aren't counted."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]

    def check(self) -> None:
        """All of it is served."""


_NOT_STORED: Final = ("background", "context_management", "conversation", "previous_response_id", "prompt")


class ResponsesBody(SampledResponse, frozen=True, kw_only=True):
    """``POST /v1/responses``. Fields that are only told again, as LMDeploy does, are read as they come."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    max_output_tokens: _Tokens | None = None
    stop: _Stop = None
    ignore_eos: bool | None = False
    include_stop_str_in_output: bool | None = False
    stream: bool | None = False
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = "auto"
    background: bool | None = False
    context_management: Any = None
    conversation: Any = None
    previous_response_id: str | None = None
    prompt: Any = None
    metadata: Any = None
    max_tool_calls: int | None = None
    parallel_tool_calls: bool | None = True
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    reasoning: Any = None
    safety_identifier: str | None = None
    service_tier: str | None = "auto"
    text: Any = None
    top_logprobs: int | None = None
    truncation: str | None = "disabled"
    user: str | None = None

    @property
    def ending(self) -> Ending:
        """Where the answer ends."""
        return Ending(
            most_tokens=self.max_output_tokens,
            stop=_words(self.stop),
            ignores_eos=bool(self.ignore_eos),
            shows_stop=bool(self.include_stop_str_in_output),
        )

    def check(self) -> None:
        """Raise ``NotServedError`` for what isn't served."""
        for name in _NOT_STORED:
            asked = getattr(self, name)
            if asked is not None and asked is not False:
                what = "background mode" if name == "background" else name
                raise NotServedError(f"{what} is not supported by Responses Text V1.", name)
        if self.input is None:
            raise NotServedError("input is required by Responses Text V1.", "input")
        if self.input == []:
            raise NotServedError("input must not be an empty list.", "input")
        choice = self.tool_choice
        if isinstance(choice, str) and choice not in {"auto", "none", "required"}:
            raise NotServedError(f"Unsupported tool_choice: {choice!r}.", "tool_choice")
        names = [tool.get("name") for tool in self.tools if tool.get("type") == "function"]
        if choice == "required" and not names:
            raise NotServedError("Tool choice 'required' must be specified with `tools`.", "tool_choice")
        if isinstance(choice, Mapping):
            if choice.get("type") != "function":
                raise NotServedError(f"Unsupported tool_choice type: {choice.get('type')!r}.", "tool_choice")
            if choice.get("name") not in names:
                raise NotServedError(
                    f"Tool choice 'function' not found in `tools`: {choice.get('name')!r}.", "tool_choice"
                )


def _words(stop: _Stop) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _not_positive(name: str, value: int, kind: str) -> str:
    return f"The {name} {value} must be a positive {kind}."


Body = ChatBody | CompletionBody | GenerateBody | MessagesBody | CountBody | ResponsesBody
Generated = ChatBody | CompletionBody | GenerateBody | MessagesBody | ResponsesBody
"""What is answered with text."""


__all__ = [
    "Body",
    "ChatBody",
    "CompletionBody",
    "CountBody",
    "GenerateBody",
    "Generated",
    "Message",
    "MessagesBody",
    "NotServedError",
    "ResponsesBody",
]
