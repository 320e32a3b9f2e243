"""Errors for prompts beyond the model's context, in the forms of engines and of the APIs.

Clients compact a conversation and ask again when they read OpenAI's code ``context_length_exceeded`` or Anthropic's
"prompt is too long". Engines have words of their own, so they are recognised by those.
"""

import re
from typing import Final, NamedTuple

CODE: Final = "context_length_exceeded"
_MOST_CHARS = 2000
_PROMPT, _ANSWER, _MOST = r"(?P<prompt>\d{1,9})", r"(?P<answer>\d{1,9})", r"(?P<maximum>\d{1,9})"
_WORDS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"prompt is too long: {_PROMPT} tokens > {_MOST}",
        rf"exceed context limit: {_PROMPT} \+ {_ANSWER} > {_MOST}",
        rf"too large: {_ANSWER}\. .{{0,80}}?context length is {_MOST} tokens.{{0,80}}? {_PROMPT} input tokens",
        rf"passed {_PROMPT} input tokens and requested {_ANSWER} output tokens.{{0,80}}?context length is only {_MOST}",
        rf"context length is {_MOST} tokens.{{0,80}}?\({_PROMPT} in the .{{0,20}}?{_ANSWER} in the completion",
        rf"context length of {_MOST} tokens.{{0,80}}? {_PROMPT} tokens from the input.{{0,30}}? {_ANSWER} tokens for",
        rf"context length is {_MOST} tokens.{{0,80}}?(?:requested|resulted in|contains at least|has) {_PROMPT}",
        rf"(?:input|prompt) .{{0,10}}?\((?:length )?{_PROMPT}\b.{{0,60}}?(?:context|model) length.{{0,5}}?{_MOST}",
        rf"request \({_PROMPT} tokens\) exceeds the available context size \({_MOST}",
        rf"`inputs` must have less than {_MOST} tokens\. Given: {_PROMPT}",
        rf"must be <= {_MOST}\. Given: {_PROMPT} `inputs` tokens and {_ANSWER}",
        rf"prompt length \({_PROMPT}(?:\.\d)?\).{{0,80}}?max_num_tokens \({_MOST}",
    )
)
_ABOUT = re.compile(
    r"context (?:length|window|size|limit)|maximum model length|max_model_len|prompt is too long", re.IGNORECASE
)
_BEYOND = re.compile(r"exceed|longer|too (?:long|large)|smaller than|maximum|reduce", re.IGNORECASE)


class ContextLength(NamedTuple):
    """How long a request was and how long it may be, as far as that is known. ``answer_tokens`` are set where the
    prompt alone would fit.
    """

    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    maximum_tokens: int | None = None

    def for_openai(self, text: str) -> str:
        """Return a message with OpenAI's phrase, from one without."""
        if "maximum context length" in text.lower():
            return text
        if self.maximum_tokens is None or self.prompt_tokens is None:
            return f"This model's maximum context length is exceeded: {text}"
        return (
            f"This model's maximum context length is {self.maximum_tokens} tokens. However, {self._requested()}. "
            "Please reduce the length of the messages or completion."
        )

    def for_anthropic(self, text: str) -> str:
        """Return a message with Anthropic's phrase, from one without."""
        prompt, most = self.prompt_tokens, self.maximum_tokens
        if "prompt is too long" in text:
            return text
        if prompt is None or most is None:
            return f"prompt is too long: {text}"
        if self.answer_tokens is not None:
            return f"input length and `max_tokens` exceed context limit: {prompt} + {self.answer_tokens} > {most}"
        return f"prompt is too long: {prompt} tokens > {min(most, prompt - 1)} maximum"

    def _requested(self) -> str:
        if self.answer_tokens is None:
            return f"your messages resulted in {self.prompt_tokens} tokens"
        return (
            f"you requested {(self.prompt_tokens or 0) + self.answer_tokens} tokens ({self.prompt_tokens} in the "
            f"messages, {self.answer_tokens} in the completion)"
        )


def context_length_in(message: str) -> ContextLength | None:
    """Return the limits in an engine's message about the context length, None for other messages."""
    shown = message[:_MOST_CHARS]
    for words in _WORDS:
        if (found := words.search(shown)) is not None:
            given = {name: int(number) for name, number in found.groupdict().items()}
            prompt, most = given["prompt"], given["maximum"]
            answer = given.get("answer") if prompt < most else None
            return ContextLength(prompt_tokens=prompt, answer_tokens=answer, maximum_tokens=most)
    about = _ABOUT.search(shown) is not None and _BEYOND.search(shown) is not None
    return ContextLength() if about else None
