"""Names and values that cross the gateway's packages."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from gateway.limits import UNLIMITED, TenantLimits

TenantId = NewType("TenantId", str)
"""Who pays for a request and whose cached blocks it may reuse."""

RequestId = NewType("RequestId", str)
"""The client's ``x-request-id`` when it is sane, otherwise one of ours."""


class Dialect(StrEnum):
    """Whose API a route speaks: it decides what errors, usage and the end of a stream look like."""

    OPENAI = "openai"
    RESPONSES = "responses"
    ANTHROPIC = "anthropic"


class Operation(StrEnum):
    """What an inference request asks for; the value is what metrics and logs call it."""

    CHAT = "chat_completions"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    RESPONSES = "responses"
    MESSAGES = "messages"
    COUNT_TOKENS = "count_tokens"
    GENERATE = "generate"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"

    @property
    def dialect(self) -> Dialect:
        match self:
            case Operation.MESSAGES | Operation.COUNT_TOKENS:
                return Dialect.ANTHROPIC
            case Operation.RESPONSES:
                return Dialect.RESPONSES
            case _:
                return Dialect.OPENAI


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """An authenticated caller. ``salt`` roots its block hashes and is known to the gateway and the engines alone."""

    id: TenantId
    salt: str
    limits: TenantLimits = UNLIMITED


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens as the engine counted them; ``cached_tokens`` is None where it doesn't say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
