"""The body of OpenAI's Responses."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

from engines.sim.bodies.refusals import NotServedError
from engines.sim.bodies.stops import Stop, stop_words
from engines.sim.endings import Ending
from engines.sim.sampling import SampledResponse

_Tokens = Annotated[int, msgspec.Meta(ge=1)]
_NOT_STORED: Final = ("background", "context_management", "conversation", "previous_response_id", "prompt")


class ResponsesBody(SampledResponse, frozen=True, kw_only=True):
    """``POST /v1/responses``. Fields that are only told again, as LMDeploy does, are read as they come."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    max_output_tokens: _Tokens | None = None
    stop: Stop = None
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
            stop=stop_words(self.stop),
            ignores_eos=bool(self.ignore_eos),
            shows_stop=bool(self.include_stop_str_in_output),
        )

    def check(self) -> None:
        """Raise ``NotServedError`` for what isn't served."""
        for name in _NOT_STORED:
            given = getattr(self, name)
            if given is not None and given is not False:
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
