"""Text of an exact number of tokens, so that requests of a trace can be asked of a real model.

A trace has numbers of blocks instead of content. Here each number gets a text of its own that has so many tokens, no
more and no fewer, wherever it stands: it is made of words that are one token each, with the space before them, and a
space is where no tokenizer of the field merges anything. Which words those are is learned from the model's tokenizer
(``learn_words``), and that it holds for long sequences of them is checked there, not assumed.

A block begins with its number, written in digits that are words, so that two numbers never have the same text; the
rest is filler out of one long text. Nothing here waits or opens a connection: ``learn_words`` is a generator that
yields what to ask a tokenizer and is sent the answers, so an asyncio client and a gevent one share it.
"""

import random
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

OPENER = "Notes:"
"""How a message begins; chat templates that strip messages can't change how it is tokenized."""
MIN_WORDS = 16
_SPACES = ("Ġ", "▁", " ")
"""How tokenizers spell the space before a word: byte-level BPE, SentencePiece, and those that spell it plainly."""
_CHECKED_TOKENS = (7, 64, 1000)
_FILLER_WORDS = 1 << 14
_SAMPLE = (
    "river stone market winter engine garden letter window silver music table forest captain history morning bridge "
    "paper harbour question summer doctor village mountain kitchen science picture journey island teacher evening the "
    "of and to in is that it was for on are as with his they at be this from have or by one had not but what all were "
    "when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made "
    "over did down only way find use may water long little very after words called just where most know get through "
    "back much before go good new write our used me man too any day same right look think also around another came "
    "come work three word must because does part even place well such here take why things help put years different "
    "away again off went old number great tell men say small every found still between name should home big give air "
    "line set own under read last never us left end along while might next sound below saw something thought both few "
    "those always looked show large often together asked house world going want school important until form food keep "
    "children feet land side without boy once animals life enough took sometimes four head above kind began almost "
    "live page got earth need far hand high year mother light parts country father let night following being study "
    "self return import def class value list dict string option file path parser argument action type default help "
    "None True False raise else elif not try except pass result error message text code group format version source"
)


class SynthesisError(ValueError):
    """Text of an exact number of tokens can't be made; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A question to a tokenizer: a text by itself, without special tokens, or as the only message of a chat.

    The latter is to be rendered by the chat template, up to where the answer begins.
    """

    text: str
    as_message: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCount:
    """The answer: how many tokens, their spelling (needed for plain texts alone), and the model's context if known."""

    count: int
    spelled: Sequence[str] = ()
    context_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What a tokenizer was found to take as one token each, and what a message costs beside its words.

    ``message_tokens`` are those of the chat template and of ``OPENER``, in a chat of one message.
    """

    words: tuple[str, ...]
    message_tokens: int
    context_tokens: int | None = None


def learn_words() -> Generator[Ask, TokenCount, Words]:
    """Ask a tokenizer what it takes as one token; raises ``SynthesisError`` where too little is, or sums don't hold."""
    sample = yield Ask(text=f" {_SAMPLE}", as_message=False)
    words = tuple(dict.fromkeys(_words_of(sample.spelled)))
    if len(words) < MIN_WORDS:
        raise SynthesisError(
            f"the tokenizer has {len(words)} words of one token among {len(_SAMPLE.split())} common ones; "
            f"{MIN_WORDS} are needed"
        )
    rng = random.Random(0)  # noqa: S311 - reproducible text, not a secret
    overheads: dict[int, int] = {}
    context = sample.context_tokens
    for tokens in _CHECKED_TOKENS:
        text = "".join(f" {word}" for word in rng.choices(words, k=tokens))
        plain = yield Ask(text=text, as_message=False)
        if plain.count != tokens:
            raise SynthesisError(
                f"the tokenizer makes {plain.count} tokens of {tokens} words that are one token each: it merges words"
            )
        counted = yield Ask(text=OPENER + text, as_message=True)
        overheads[tokens] = counted.count - tokens
    if min(overheads.values()) < 1:
        raise SynthesisError(
            f"a message has no more tokens than the words in it (words: tokens beside them): {overheads}"
        )
    if len(set(overheads.values())) != 1:
        raise SynthesisError(f"a message's own tokens depend on its length (words: tokens beside them): {overheads}")
    return Words(words=words, message_tokens=overheads[_CHECKED_TOKENS[0]], context_tokens=context)


def _words_of(spelled: Sequence[str]) -> Iterator[str]:
    for piece, following in pairwise([*spelled, " "]):
        # A piece is a whole word only where the next one begins a new word.
        word = piece[1:]
        if piece[:1] in _SPACES and following[:1] in _SPACES and word.isascii() and word.isalpha():
            yield word


class TextMaker:
    """Makes the same text of the same number and length every time; ``seed`` makes all of them others.

    A text costs about as much as copying it: filler is cut out of one long text.
    """

    def __init__(self, words: Sequence[str], *, seed: int = 0) -> None:
        if len(words) < MIN_WORDS:
            raise SynthesisError(f"{len(words)} words; {MIN_WORDS} are needed")
        rng = random.Random(seed)  # noqa: S311 - reproducible text, not a secret
        self._digits = [f" {word}" for word in rng.sample(list(words), len(words))]
        filler = rng.choices(self._digits, k=_FILLER_WORDS)
        self._filler = "".join(filler)
        self._begins = [0, *accumulate(map(len, filler))]

    def digits(self, count: int) -> int:
        """Return how many tokens tell ``count`` numbers apart; a block needs as many at least."""
        digits, distinct = 1, len(self._digits)
        while distinct < count:
            digits, distinct = digits + 1, distinct * len(self._digits)
        return digits

    def text(self, number: int, tokens: int, *, digits: int = 0) -> str:
        """Return the text of a number: exactly so many tokens, each a word with the space before it.

        Its first ``digits`` tokens spell the number, or as many as there is room for. Numbers count from 0.
        """
        spelled = []
        rest = number
        for _ in range(min(digits, tokens)):
            rest, digit = divmod(rest, len(self._digits))
            spelled.append(self._digits[digit])
        spelled.extend(self._fill(number, tokens - len(spelled)))
        return "".join(spelled)

    def _fill(self, number: int, tokens: int) -> Iterator[str]:
        start = number * 2_654_435_761 % _FILLER_WORDS  # Knuth's multiplier: neighbours lie far apart
        while tokens > 0:
            end = min(start + tokens, _FILLER_WORDS)
            yield self._filler[self._begins[start] : self._begins[end]]
            tokens -= end - start
            start = 0


class BlockTexts:
    """The texts of a trace's blocks, each of ``block_tokens`` tokens; what blocks share in the trace, texts share.

    Blocks are known beforehand, ``SynthesisError`` where ``block_tokens`` are too few to tell so many apart. Where two
    prompts part in the trace their texts part within the first ``digits`` tokens of the block.
    """

    def __init__(self, maker: TextMaker, numbers: Mapping[int, int], *, block_tokens: int) -> None:
        self.digits = maker.digits(len(numbers))
        if block_tokens < self.digits:
            raise SynthesisError(
                f"{block_tokens} tokens a block can't tell {len(numbers)} blocks apart: {self.digits} are needed"
            )
        self.block_tokens = block_tokens
        self._maker = maker
        self._numbers = numbers

    def content(self, block_ids: Sequence[int], tokens: int, *, tail: int) -> str:
        """Return the text of a prompt of exactly ``tokens`` tokens: its blocks in order, cut where it ends.

        What blocks don't cover is filled with text of the number ``tail``, which no block has.
        """
        parts = []
        left = tokens
        for block in block_ids:
            size = min(left, self.block_tokens)
            if size <= 0:
                break
            parts.append(self._maker.text(self._numbers[block], size, digits=self.digits))
            left -= size
        if left > 0:
            parts.append(self._maker.text(len(self._numbers) + tail, left, digits=max(self.digits + 1, 4)))
        return "".join(parts)
