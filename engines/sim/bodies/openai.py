"""OpenAI's bodies: chats and completions."""

from typing import Annotated, Any, Literal

import msgspec

from engines.requests.completions import MOST_ANSWERS, problem_of, prompts_of
from engines.sim.bodies.refusals import NO_EXPERTS, NO_LOGPROBS, UNPREPARED, NotServedError, not_positive
from engines.sim.bodies.stops import Stop, stop_words
from engines.sim.endings import Ending
from engines.sim.sampling import Penalised, ResponseFormat, StreamOptions, Tool, ToolChoice


class _Sampled(Penalised, frozen=True, kw_only=True):
    model: str
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    stop: Stop = None
    ignore_eos: bool | None = False

    @property
    def ending(self) -> Ending:
        """Where the answer ends."""
        return Ending(most_tokens=self.most_tokens, stop=stop_words(self.stop), ignores_eos=bool(self.ignore_eos))

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
            stop=stop_words(self.stop),
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
            raise NotServedError(f"Logprobs({self.logprobs})/top_logprobs({self.top_logprobs or 0}) {NO_LOGPROBS}")
        if self.return_logprob:
            raise NotServedError(f"return_logprob({self.return_logprob}) {NO_LOGPROBS}.")
        if self.choices < 1:
            raise NotServedError(not_positive("n", self.choices, "int"))
        if self.choices > MOST_ANSWERS:
            raise NotServedError(f"The n {self.choices} exceeds the maximum supported choices ({MOST_ANSWERS}).")
        if self.choices > 1 and self.session_id not in (None, -1):
            raise NotServedError("n > 1 cannot be used with an explicit session_id.")
        for name in ("max_completion_tokens", "max_tokens"):
            most = getattr(self, name)
            if most is not None and most < 1:
                raise NotServedError(not_positive(name, most, "integer"))
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
            raise NotServedError(NO_EXPERTS)


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
            raise NotServedError(f"logprobs({self.logprobs}) {NO_LOGPROBS}.")
        if self.n < 1:
            raise NotServedError(not_positive("n", self.n, "int"))
        prompts = prompts_of(self.prompt)
        if any(type(each) is not int for ids in prompts if isinstance(ids, list) for each in ids) or any(
            isinstance(each, int) for each in prompts
        ):
            raise NotServedError(UNPREPARED)
        if problem := problem_of(len(prompts), self.n):
            raise NotServedError(problem)
        if self.most_tokens is not None and self.most_tokens < 1:
            raise NotServedError(f"max_new_tokens must be at least 1, got {self.most_tokens}.")
