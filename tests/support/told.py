"""What an instance tells on the routes that generate, streamed or not, in the fewest words."""

import json
from typing import Any, NamedTuple

from engines.sim.text import SimTokenizer
from tests.support import kv_events

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


class Answer(NamedTuple):
    """``events`` of a stream, without ``[DONE]``; ``body`` of an answer that isn't one, or refused."""

    status: int
    body: Any
    events: list[Any]


def tell(url: str, path: str, **body: Any) -> Answer:
    """Ask the model ``m``, greedily."""
    asked = {"temperature": 0, **({} if path == GENERATE else {"model": "m"}), **body}
    answer = kv_events.post(url + path, asked, {"anthropic-version": "2023-06-01"})
    if answer.status != 200 or not body.get("stream"):
        return Answer(answer.status, answer.body, [])
    lines = [line[6:] for line in answer.raw.decode().splitlines() if line.startswith("data: ")]
    return Answer(answer.status, None, [json.loads(line) for line in lines if line != "[DONE]"])


def asked_about(subject: str) -> list[dict[str, str]]:
    """A chat of one message."""
    return [{"role": "user", "content": f"Tell me about {subject}."}]


def stop_in(tokenizer: SimTokenizer, ids: list[int]) -> tuple[str, int]:
    """A word that ends an answer of these tokens, and the place of the token that it ends it at, past the first."""
    for place, token in enumerate(ids):
        word = tokenizer.shown(token)
        if place and token in tokenizer.stop_tokens(word) and not tokenizer.stop_tokens(word) & set(ids[:place]):
            return word, place
    raise AssertionError(f"no token of {ids} can be a stop word")


def choices(answer: Answer) -> dict[int, tuple[str, str]]:
    """Each choice's text and why it ended, whole or from chunks."""
    found: dict[int, tuple[str, str]] = {}
    for said in (answer.body,) if answer.body else answer.events:
        for choice in said["choices"]:
            text, reason = found.get(choice["index"], ("", ""))
            message = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
            found[choice["index"]] = (text + (message["content"] or ""), choice.get("finish_reason") or reason)
    return found


def shape(said: Any) -> Any:
    """A body's names, and the kinds of its values; of a list its first."""
    match said:
        case dict():
            return {name: shape(value) for name, value in said.items()}
        case list():
            return [shape(each) for each in said[:1]]
    return type(said).__name__


__all__ = [
    "CHAT",
    "COMPLETIONS",
    "GENERATE",
    "MESSAGES",
    "RESPONSES",
    "Answer",
    "asked_about",
    "choices",
    "shape",
    "stop_in",
    "tell",
]
