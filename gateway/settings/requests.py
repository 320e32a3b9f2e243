"""Bounds on one request and its body, and the tokenizer that reads its prompt."""

from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from gateway.http.body_memory import TIMES
from gateway.settings.section import Seconds, Section

_MIB = 1 << 20


class RequestSettings(Section):
    """Bounds on one request and its body, and the tokenizer that reads its prompt."""

    tokenizer: Path | None = Field(
        None,
        description="Model folder with tokenizer and chat template; without it no text is routed by announced blocks.",
    )
    tokenizer_memory_bytes: int = Field(
        64 * _MIB, ge=0, le=1 << 36, description="Memory for tokens of earlier texts, in bytes."
    )
    max_body_bytes: int = Field(
        32 * _MIB,
        ge=1024,
        le=1 << 30,
        description="Longest request body, in bytes. Parsing a long one holds up other requests: 1.5 ms a MiB.",
    )
    body_memory_bytes: int = Field(
        1 << 30,
        ge=2048,
        le=1 << 40,
        description="Memory for the bodies of all requests, in bytes, at least 16 times max_body_bytes: each byte of a "
        "body counts 8 times while it is read and 16 times more (40 for /tokenize) in a thread that tokenizes it. A "
        "tenant may hold as much as is free, and gets 429 for a body beyond that.",
    )
    body_timeout_s: Seconds = Field(60.0, description="Longest time for a client to send its body, in seconds.")
    request_timeout_s: Seconds = Field(
        3600.0, description="Longest time for a request, from its arrival to the last byte of its answer, in seconds."
    )
    max_answers: int = Field(
        128,
        ge=1,
        le=4096,
        description="Answers that one request may ask for, prompts times n or best_of; more are refused with 400.",
    )
    expected_output_tokens: int = Field(
        256, ge=1, le=1 << 20, description="Tokens reserved for an answer without a limit of its own."
    )

    @field_validator("tokenizer")
    @classmethod
    def _folder(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_dir():
            raise ValueError("the tokenizer is a folder that exists, as saved with a Hugging Face model")
        return value

    @model_validator(mode="after")
    def _memory_for_two(self) -> Self:
        least = 2 * TIMES * self.max_body_bytes
        if self.body_memory_bytes < least:
            raise ValueError(
                f"body_memory_bytes is at least {2 * TIMES} times max_body_bytes, {least}: each byte of a body counts "
                f"{TIMES} times and a tenant may hold as much as is free, so the longest body would never fit"
            )
        return self
