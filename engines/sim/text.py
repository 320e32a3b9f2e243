"""Prompts become tokens with a model's own tokenizer, as LMDeploy does it; answers are words that mean nothing.

The tokenizer and the chat template are real, so block names equal those that a gateway computes. An answer's tokens are
drawn, by seed and prompt, from words of one token each whose text is read back as the same tokens: so the next turn of
a conversation begins with the blocks of this one.
"""

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from kvcontrol.tokenization.chat_template import ChatTemplate, parsed_call

_MOST_WORDS: Final = 512
_LEAST_WORDS: Final = 2
_MOST_STOP_TOKENS: Final = 5
_KEPT_STOP_WORDS: Final = 64
_TOKENIZER: Final = "tokenizer.json"


class TextError(ValueError):
    """A prompt or a tokenizer can't be used; the message says why."""


class SimTokenizer:
    """Takes a moment to load. Raises ``TextError`` for a folder without a tokenizer that can be used."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = _load(folder)
        self.words = self._find_words()
        if len(self.words) < _LEAST_WORDS:
            raise TextError(f"{folder}: the tokenizer has no words of one token, of which answers could be made")
        self._template = ChatTemplate(self._tokenizer)
        self.has_inline_system = self._template.renders_inline_system
        """Whether the template shows a system message where it stands, not at the front alone."""
        self.vocab_tokens = len(self._tokenizer)
        self.end_token: int | None = self._tokenizer.eos_token_id
        self.stop_tokens = lru_cache(_KEPT_STOP_WORDS)(self._stop_tokens)
        """The tokens that end an answer for a stop word."""

    def chat(self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]) -> list[int]:
        """Return a conversation's tokens; raises ``TextError`` for one that the template refuses."""
        if not self._template.exists:
            raise TextError("the model has no chat template; ask /v1/completions")
        nobody = next((place for place, each in enumerate(messages) if "role" not in each), None)
        if nobody is not None:
            raise TextError(f"messages[{nobody}] has no role")
        read = [_with_arguments({**each, "content": _text(each.get("content"))}) for each in messages]
        try:
            text = self._template.render(read, kwargs)
        except Exception as error:
            raise TextError(f"the chat template refused the messages: {error}") from error
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        """Return a text's tokens, with those that the tokenizer adds by itself."""
        return list(self._tokenizer.encode(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer's tokens."""
        return str(self._tokenizer.decode(list(tokens)))

    def shown(self, token: int) -> str:
        """Return the text of one token, special ones too."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def answer(self, seed: str, tokens: int, *, without: Collection[int] = (), until: int = 0) -> list[int]:
        """Return an answer of so many tokens, the first ``until`` of which are none of ``without``.

        The same arguments, the same answer. Raises ``TextError`` when no words are left.
        """
        draw = random.Random(seed)  # noqa: S311 - to be repeatable is what it is for
        answer = draw.choices(self.words, k=tokens)
        places = [place for place, token in enumerate(answer[:until]) if token in without] if without else []
        if places:
            left = [word for word in self.words if word not in without]
            if not left:
                raise TextError("stop covers every word of a simulated engine, so that none could be generated")
            for place in places:
                answer[place] = draw.choice(left)
        return answer

    def _stop_tokens(self, word: str) -> frozenset[int]:
        """LMDeploy's rule: a word of one token stands for all tokens that contain it; where these are many, for those
        that are nothing else. One of several tokens ends nothing.
        """
        if len(self._bare(word)) > 1:
            return frozenset()
        tokenizer = self._tokenizer
        word = "\u2581" if word == " " else word
        names = tokenizer.convert_ids_to_tokens(list(range(tokenizer.vocab_size)))
        found = [token for token, name in enumerate(names) if word in name]
        if len(found) > _MOST_STOP_TOKENS:
            found = [token for token in found if tokenizer.decode([token], skip_special_tokens=True) == word]
            del found[_MOST_STOP_TOKENS:]
        if not found and len(alone := self._bare(word)) == 1:
            found = alone
        return frozenset(found)

    def _bare(self, word: str) -> list[int]:
        """A word's tokens without the one that begins a prompt."""
        encoded = self.encode(word)
        return encoded[1:] if encoded[:1] == [self._tokenizer.bos_token_id] else encoded

    def _find_words(self) -> list[int]:
        """Tokens that are a space and letters, and stay themselves between others."""
        found = []
        for token in range(len(self._tokenizer)):
            text = self.decode([token])
            if len(text) > 2 and text[0] == " " and text[1:].isascii() and text[1:].isalpha():  # noqa: PLR2004
                found.append(token)
            if len(found) >= _MOST_WORDS:
                break
        good = [token for token in found if self._reads_back([token, token])]
        while good and not self._reads_back(good):
            good = [token for token, text in zip(good, self._reread(good), strict=False) if token == text]
        return good

    def _reads_back(self, tokens: Sequence[int]) -> bool:
        return self._reread(tokens) == list(tokens)

    def _reread(self, tokens: Sequence[int]) -> list[int]:
        return list(self._tokenizer.encode(self.decode(tokens), add_special_tokens=False))


def _load(folder: Path) -> Any:
    if not folder.is_dir():
        raise TextError(f"{folder}: no such folder; pass a model folder with a {_TOKENIZER}")
    if not (folder / _TOKENIZER).is_file():
        raise TextError(f"{folder}: there is no {_TOKENIZER} in it, as a model folder of Hugging Face's form has")
    from transformers import PreTrainedTokenizerFast  # not AutoTokenizer, which would bring torch

    try:
        return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # what reads it says in any way that it can't
        raise TextError(f"{folder / _TOKENIZER} can't be read, or a file beside it: {error}") from error


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose tool calls have their arguments as an object, which templates want."""
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [parsed_call(call) for call in calls]
    return message


def _text(content: object) -> str:
    """A message's content as LMDeploy reads it: text parts joined by newlines, nothing for null."""
    match content:
        case None:
            return ""
        case str():
            return content
        case list():
            return "\n".join(_parts(content))
        case _:
            raise TextError(f"content is a {type(content).__name__}; allowed is text, or a list of text parts")


def _parts(content: Sequence[object]) -> Iterator[str]:
    for part in content:
        match part:
            case {"type": "text", "text": str(text)}:
                yield text
            case _:
                raise TextError("content has a part that isn't text; a simulated engine reads text alone")
