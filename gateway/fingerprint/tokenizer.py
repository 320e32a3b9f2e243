"""The model's own tokenizer and chat template."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from gateway.errors import SettingsError
from kvcontrol.core.hashing import token_bytes
from kvcontrol.tokenization import (
    PART_CHARS,
    Memoryless,
    PieceMemory,
    RememberingEncoder,
    SlowEncoder,
    Sought,
    TextEncoder,
    choose_encoder,
    remembering,
)
from kvcontrol.tokenization.chat_template import ChatTemplate

DEFAULT_MEMORY_BYTES = 64 << 20

_LONGEST_RUN_CHARS: Final = 4 * PART_CHARS
"""No text of words has such a run without a place to cut at: 60 MB to encode."""
_LONGEST_TEXT_CHARS: Final = 32 * PART_CHARS
"""The same of tokenizers whose texts can't be cut."""

_log = logging.getLogger(__name__)


class LongRunError(ValueError):
    """A text has a run, without a place to cut it at, that takes too much memory to be encoded at once."""

    def __init__(self, chars: int, most_chars: int) -> None:
        super().__init__(
            f"{chars} characters have no place between words or lines where the text can be cut; at most {most_chars} "
            "are tokenized at once"
        )


class ModelTokenizer:
    """Renders and encodes; both hold the calling thread, ``encode`` lets the GIL go where the tokenizer is a fast one.

    ``memory`` is where each tenant's encoded pieces of text are remembered, for tokenizers that allow it (``pieces``).
    """

    def __init__(self, tokenizer: Any, memory: PieceMemory) -> None:
        self._tokenizer = tokenizer
        self.memory = memory
        self.thread_safe = bool(tokenizer.is_fast)
        """Whether several threads may encode at once."""
        self._encoder: TextEncoder = SlowEncoder(tokenizer)
        self._remembering: RememberingEncoder | None = None
        if self.thread_safe:
            self._encoder = _fastest(tokenizer.backend_tokenizer)
            self._remembering = _remembering(self._encoder, tokenizer.backend_tokenizer, memory)
        cuts = self._remembering is not None and self._remembering.cuts is not None
        self._longest_chars = _LONGEST_RUN_CHARS if cuts else _LONGEST_TEXT_CHARS
        self._template = ChatTemplate(tokenizer)
        self.has_chat_template = self._template.exists

    @property
    def remembers(self) -> bool:
        """Whether what is encoded is remembered by pieces."""
        return self._remembering is not None

    def render(
        self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any], *, inline_system: bool = False
    ) -> str:
        """See ``ChatTemplate.render``."""
        return self._template.render(messages, kwargs, inline_system=inline_system)

    def encode(self, text: str, *, salt: str) -> bytes:
        """Return packed token ids, with the special tokens that the tokenizer adds by itself.

        ``salt`` is that of the tenant, whose earlier texts make this one faster. Raises ``UnicodeEncodeError`` for half
        a surrogate pair, ``LongRunError``.
        """
        sought = self.look_up(text, salt=salt)
        return self._whole(text, special=True) if sought is None else sought.ids()

    def look_up(self, text: str, *, salt: str, most_pieces: int | None = None) -> Sought | None:
        """Return what is remembered of a text's ids, None where nothing ever is. Without encoding anything: about a
        microsecond a kilobyte, and three a piece. Raises ``UnicodeEncodeError`` for half a surrogate pair,
        ``LongRunError``, ``ManyPiecesError``.
        """
        if self._remembering is None:
            return None
        sought = self._remembering.look_up(text, salt=salt, most_pieces=most_pieces)
        self._check_run(sought.longest_chars)
        return sought

    def packed_ids(self, text: str, *, special: bool, salt: str) -> bytes:
        """Like ``encode``, with the tokenizer's own special tokens or without."""
        if special or self._remembering is None:
            return self.encode(text, salt=salt) if special else self._whole(text, special=False)
        return self._remembering.unframed(self.encode(text, salt=salt))

    def token_ids(self, text: str, *, special: bool) -> list[int]:
        """Return ``packed_ids`` as numbers."""
        return memoryview(self.packed_ids(text, special=special, salt="")).cast("I").tolist()

    def _whole(self, text: str, *, special: bool) -> bytes:
        """The ids of a text that isn't cut."""
        self._check_run(len(text))
        text.encode()  # raises for half a surrogate pair, as some tokenizers don't
        if special:
            return self._encoder.encode(text)
        if self.thread_safe:  # without the GIL
            backend = self._tokenizer.backend_tokenizer
            return token_bytes(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        return token_bytes(self._tokenizer.encode(text, add_special_tokens=False))

    def _check_run(self, chars: int) -> None:
        if chars > self._longest_chars:
            raise LongRunError(chars, self._longest_chars)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary spells it."""
        texts: list[str] = self._tokenizer.convert_ids_to_tokens(list(ids))
        return texts

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special ones included.

        Raises ``OverflowError`` or ``IndexError`` for ids that are none.
        """
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


def _fastest(backend: Any) -> TextEncoder:
    choice = choose_encoder(backend)
    _log.info("tokenizer %s: %s", choice.name, choice.reason)
    return choice.encoder


def _remembering(encoder: TextEncoder, backend: Any, memory: PieceMemory) -> RememberingEncoder | None:
    remembered = remembering(encoder, backend, memory)
    if isinstance(remembered, Memoryless):
        _log.info("every prompt is tokenized as a whole: %s", remembered.reason)
        return None
    return remembered


def load_tokenizer(folder: Path, memory_bytes: int = DEFAULT_MEMORY_BYTES) -> ModelTokenizer:
    """Read a model folder's tokenizer; takes seconds. Raises ``SettingsError`` when it has none that can be used."""
    from transformers import AutoTokenizer

    try:
        return ModelTokenizer(
            AutoTokenizer.from_pretrained(str(folder), local_files_only=True), PieceMemory(memory_bytes)
        )
    except Exception as error:  # transformers raises anything on a folder that is not right
        raise SettingsError(
            f"settings: tokenizer = {str(folder)!r}: no usable tokenizer with a chat template there: {error}"
        ) from error
