"""How answers are to be drawn: fields of LMDeploy's bodies that change nothing of what a simulated engine says.

They are read all the same: what LMDeploy refuses for its type or its range is refused here.
"""

from typing import Annotated, Any, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
Heat = Annotated[float, msgspec.Meta(ge=0, le=2)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
SomeShare = Annotated[float, msgspec.Meta(gt=0, le=1)]


class _Drawn(msgspec.Struct, frozen=True, kw_only=True):
    temperature: Heat | None = None
    top_k: Count | None = None
    min_p: Share | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = True


class Sampled(_Drawn, frozen=True, kw_only=True):
    """Of chat, completions and ``/generate``."""

    top_p: SomeShare | None = None
    repetition_ngram_size: Count = 0
    repetition_ngram_threshold: Count = 0
    session_id: int | None = -1
    spaces_between_special_tokens: bool | None = True


class Penalised(Sampled, frozen=True, kw_only=True):
    """Of chat and completions."""

    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    seed: int | None = None
    user: str | None = None


class SampledResponse(_Drawn, frozen=True, kw_only=True):
    """Of ``/v1/responses``."""

    top_p: Share | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``include_usage``: one more event before the last has the usage."""

    include_usage: bool | None = False


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True):
    """A schema that a chat's answer is to follow."""

    name: str
    description: str | None = None
    json_schema: dict[str, Any] | None = msgspec.field(default=None, name="schema")
    strict: bool | None = False


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """What a chat's answer is to look like."""

    type: Literal["text", "json_object", "json_schema", "regex_schema"]
    json_schema: JsonSchema | None = None
    regex_schema: str | None = None


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """What a chat's tool does."""

    description: str | None = None
    name: str
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of a chat."""

    function: Function
    type: str = "function"


class Named(msgspec.Struct, frozen=True, kw_only=True):
    """A function that is to be called."""

    name: str


class _Some(msgspec.Struct, frozen=True, kw_only=True):
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Which tool a chat is to call: ``function`` alone, or any of ``allowed_tools``."""

    type: Literal["function", "allowed_tools"] | None = None
    function: Named | None = None
    allowed_tools: _Some | None = None

    def __post_init__(self) -> None:
        named = self.type != "allowed_tools" and self.function is not None
        if not named and (self.type == "function" or self.allowed_tools is None):
            raise ValueError("it names no function, and no allowed_tools")
