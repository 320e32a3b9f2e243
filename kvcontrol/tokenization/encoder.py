"""From text to packed token ids, with whichever library does it fastest and gets it right.

Two encoders give the ids that the model's own tokenizer gives: Hugging Face's ``tokenizers``, always there, and
``fastokens``, an optional package that is tens of times faster on long texts. The fast one is only used after it
agreed with the other on texts that are hard to get right; where it can't load the tokenizer or disagrees once, that is
said, and the other one is used. Both let the GIL go while they work.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from kvcontrol.core.hashing import token_bytes

_log = logging.getLogger(__name__)

MOST_OVERLAPS = 20_000
"""Of added tokens, that are tried; tens of ms a thousand."""
_MOST_SPELLINGS = 2_000
_SPELLED_AT_ONCE = 500
_HARD_TEXTS = (
    "",
    " ",
    "The capital of France is Paris.\n\nAnd that's it, isn't it?  Two  spaces, three   more.",
    "def f(x: int) -> dict[str, int]:\n\treturn {'a': x ** 2}  # 0x1F, 1_000_000, 3.14e-10\n",
    "人工智能正在改变世界。北京的秋天很美，我们去看红叶吧！",
    "日本語と한국어と العربية ไทย हिन्दी Ελληνικά кириллица",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 e\u0301 \u00e9 \ufb01 \u200b\u200d \ufeff",
    '{"name": "get_weather", "arguments": "{\\"city\\": \\"Zürich\\"}"}',
    "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|> <|endoftext|></s><s>[INST] [/INST]<|eot_id|><|im_start",
    "a" * 3000,
    "\n" * 40 + "\t" * 7 + " " * 100 + "x",
    "1234567890" * 30,
    "\x00\x01\x7f \u2028 \U0010ffff \ud7ff",
    "https://example.org/a?b=c&d=%20#frag user@example.org C:\\Users\\x",
    "ＦＵＬＬｗｉｄｔｈ ½ ² Ⅷ ﷺ Å",
    "One line of words\nand\nanother One!\nx y z\n中文 and text\nÉtat, c'est moi\n\nlast lines\n a\r\nb\nc",
)


class TextEncoder(Protocol):
    """Encodes text exactly as the model's tokenizer does; any thread."""

    def encode(self, text: str) -> bytes:
        """Return packed token ids, with the special tokens that the tokenizer adds by itself.

        Raises ``UnicodeEncodeError`` for half a surrogate pair, which is no text in any tokenizer.
        """


class HuggingFaceEncoder:
    """The Rust core of a Hugging Face fast tokenizer. Its ``encode`` would hold the GIL; its batch form doesn't."""

    name = "tokenizers"

    def __init__(self, backend: Any) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend

    def encode(self, text: str) -> bytes:
        try:
            return token_bytes(self._backend.encode_batch_fast([text], add_special_tokens=True)[0].ids)
        except TypeError:
            text.encode()  # says what is wrong, and where
            raise


class FastokensEncoder:
    """``fastokens`` over the same tokenizer definition."""

    name = "fastokens"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> bytes:
        return token_bytes(self._tokenizer.encode(text, add_special_tokens=True).ids)


class SlowEncoder:
    """A tokenizer without a Rust core, through ``transformers``; one thread at a time."""

    name = "transformers"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> bytes:
        text.encode()  # some slow tokenizers would let half a surrogate pair pass, each in its own way
        return token_bytes(self._tokenizer.encode(text, add_special_tokens=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An encoder, and why it is this one."""

    encoder: TextEncoder
    name: str
    reason: str


def choose_encoder(backend: Any) -> Choice:
    """Return the fastest encoder that agrees with a Hugging Face fast tokenizer's ``backend`` on every hard text."""
    reference = HuggingFaceEncoder(backend)
    try:
        import fastokens
    except ImportError:
        return Choice(encoder=reference, name=reference.name, reason="fastokens is not installed")
    try:
        fast = FastokensEncoder(fastokens.Tokenizer.from_json_str(backend.to_str()))
        wrong = disagreement(fast, reference, (*islice(overlaps(backend), MOST_OVERLAPS), *spellings(backend)))
    except Exception as error:  # noqa: BLE001 - a tokenizer of a kind that it doesn't know ends in any exception
        return Choice(encoder=reference, name=reference.name, reason=f"fastokens can't load this tokenizer: {error}")
    if wrong is not None:
        _log.warning("fastokens disagrees with the model's tokenizer on %r; it is not used", wrong[:40])
        return Choice(encoder=reference, name=reference.name, reason="fastokens disagrees with the model's tokenizer")
    return Choice(encoder=fast, name=fast.name, reason="it agrees with the model's tokenizer")


def disagreement(one: TextEncoder, other: TextEncoder, more: Iterable[str] = ()) -> str | None:
    """Return the first hard text, pair of them, or text of ``more`` that two encoders encode differently, if any."""
    pairs = (first + second for first in _HARD_TEXTS[2:9] for second in _HARD_TEXTS[2:9])
    return next((text for text in (*_HARD_TEXTS, *pairs, *more) if one.encode(text) != other.encode(text)), None)


def overlaps(backend: Any) -> Iterator[str]:
    """Yield texts in which two of a tokenizer's added tokens overlap, one beginning within the other or lying in it.

    It depends on the order of matching who wins. Each way once; O(characters of the added tokens) and what is yielded.
    """
    added = dict.fromkeys(token.content for token in backend.get_added_tokens_decoder().values())
    begin_with: dict[str, list[str]] = {}
    for token in added:
        for length in range(1, len(token)):
            begin_with.setdefault(token[:length], []).append(token)
    for first in added:
        for start in range(len(first)):
            if any(first[start:end] in added for end in range(start + 1, len(first) + (start > 0))):
                yield first  # another one lies in it
                break
        for start in range(1, len(first)):
            for second in begin_with.get(first[start:], ()):
                yield first[:start] + second


def spellings(backend: Any) -> Iterator[str]:
    """Yield texts that spell every token of the vocabulary, as it is stored and as it is decoded, each its own piece.

    A token may not be what its spelling is encoded to: where unknown characters fall back to bytes, the *text* "<0x0A>"
    is six bytes and not the token of that name. O(vocabulary), about a second for 50,000 tokens.
    """
    vocabulary = backend.get_vocab(with_added_tokens=False)
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    spelled = [*vocabulary, *backend.decode_batch([[number] for number in vocabulary.values()])]
    if not added:
        yield from spelled[:_MOST_SPELLINGS]
        return
    for start in range(0, len(spelled), _SPELLED_AT_ONCE):
        yield added[0] + added[0].join(spelled[start : start + _SPELLED_AT_ONCE])
