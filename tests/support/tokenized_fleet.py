"""Scripted engines and a gateway that both have the tiny model's tokenizer: prompts have real counts and blocks."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gateway.fingerprint.tokenizer import ModelTokenizer, load_tokenizer
from tests.support.fleet import Fleet, running_fleet
from tests.support.scripted_engine import ScriptedEngine


def encoding_engine(tokenizer: ModelTokenizer) -> ScriptedEngine:
    """An engine that counts and caches a chat's tokens as the model's template and tokenizer make them."""

    def encode(messages: Sequence[dict[str, Any]]) -> list[int]:
        return tokenizer.token_ids(tokenizer.render(messages, {}), special=True)

    return ScriptedEngine(encode=encode)


@asynccontextmanager
async def tokenized_fleet(state: Path, model: Path, **settings: Any) -> AsyncIterator[Fleet]:
    """Run two such engines behind a gateway; ``model`` is a folder with a tokenizer."""
    tokenizer = load_tokenizer(model)
    engines = {name: encoding_engine(tokenizer) for name in ("a", "b")}
    async with running_fleet(state, engines, tokenizer=model, **settings) as fleet:
        yield fleet


__all__ = ["encoding_engine", "tokenized_fleet"]
