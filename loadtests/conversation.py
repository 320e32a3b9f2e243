"""What each kind of user says next: messages of exactly as many tokens as the scenario has.

Texts that users share (system prompts, documents) are the same for all of them; everything else is never said twice.
"""

import random
from collections.abc import Iterator
from itertools import accumulate

from kvcontrol.traces.synthesis import OPENER, TextMaker, Words
from loadtests.exchange import Message
from loadtests.scenario import Agent, Batch, Chat, Kind, Rag

_SHARED = 1 << 20
"""Numbers below are those of texts that users share; a text of one user alone has a number from here on."""
_OWN_BITS = 44
_TEMPLATE_TOKENS = 64
"""What a chat template may add to a few messages; a conversation ends so far below the model's context."""


class Texts:
    """All texts of a run; ``seed`` makes all of them others."""

    def __init__(self, words: Words, *, seed: int) -> None:
        self._maker = TextMaker(words.words, seed=seed)
        self._digits = self._maker.digits(_SHARED + (1 << _OWN_BITS))

    def shared(self, number: int, tokens: int) -> str:
        """Return the text of a number, the same for everybody."""
        return OPENER + self._maker.text(number, tokens, digits=self._digits)

    def own(self, rng: random.Random, tokens: int) -> str:
        """Return a text that nobody else has."""
        return OPENER + self._maker.text(_SHARED + rng.getrandbits(_OWN_BITS), tokens, digits=self._digits)


class Talk:
    """One conversation at a time of one user, for ever. ``context_tokens`` bounds it; 0 where that is unknown."""

    def __init__(self, kind: Kind, texts: Texts, rng: random.Random, *, context_tokens: int) -> None:
        self.kind = kind
        self._texts = texts
        self._rng = rng
        self._context_tokens = context_tokens
        self._messages: list[Message] = []
        self._turn = 0
        self._used_tokens = 0
        self._documents = list(accumulate(_zipf(kind))) if isinstance(kind, Rag) else []

    def next_messages(self) -> list[Message]:
        """Return what to ask now: a turn more, or a new conversation."""
        if self._goes_on():
            self._messages.append(_user(self._texts.own(self._rng, self._turn_tokens)))
        else:
            self._messages = list(self._opening())
            self._turn = 0
        self._turn += 1
        return self._messages

    def answered(self, text: str, tokens: int) -> None:
        """Take note of an answer to ``next_messages``, and of how many tokens prompt and answer had."""
        self._messages.append({"role": "assistant", "content": text})
        self._used_tokens = tokens

    def broken(self) -> None:
        """Take note that there was no answer: the next message begins a new conversation."""
        self._messages = []

    def _goes_on(self) -> bool:
        if not self._messages or self._turn >= self._turns:
            return False
        needed = self._used_tokens + self._turn_tokens + self.kind.answer_tokens + _TEMPLATE_TOKENS
        return not self._context_tokens or needed <= self._context_tokens

    @property
    def _turns(self) -> int:
        match self.kind:
            case Chat(turns=turns) | Agent(steps=turns):
                return turns
        return 1

    @property
    def _turn_tokens(self) -> int:
        match self.kind:
            case Chat(turn_tokens=tokens) | Agent(result_tokens=tokens):
                return tokens
        return 0

    def _opening(self) -> Iterator[Message]:
        kind, texts, rng = self.kind, self._texts, self._rng
        system = rng.randrange(kind.system_prompts) if isinstance(kind, Chat | Agent) else 0
        number = [Chat, Agent, Rag, Batch].index(type(kind)) * 10_000 + system
        yield {"role": "system", "content": texts.shared(number, kind.system_tokens)}
        match kind:
            case Chat(first_tokens=tokens) | Agent(task_tokens=tokens) | Batch(prompt_tokens=tokens):
                yield _user(texts.own(rng, tokens))
            case Rag():
                chosen = rng.choices(range(kind.documents), cum_weights=self._documents, k=kind.chosen)
                documents = [texts.shared(100_000 + each, kind.document_tokens) for each in chosen]
                yield _user("\n\n".join([*documents, texts.own(rng, kind.question_tokens)]))


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _zipf(kind: Rag) -> Iterator[float]:
    for rank in range(1, kind.documents + 1):
        yield rank**-kind.skew
