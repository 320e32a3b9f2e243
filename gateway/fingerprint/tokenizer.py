"""The model's own tokenizer and chat template, used exactly as LMDeploy's ``HFChatTemplate`` does."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.errors import SettingsError
from gateway.fingerprint.canonical import merged_system
from kvcontrol.tokenization import (
    Memoryless,
    PieceMemory,
    RememberingEncoder,
    SlowEncoder,
    Sought,
    TextEncoder,
    choose_encoder,
    remembering,
)

DEFAULT_MEMORY_BYTES = 64 << 20

_log = logging.getLogger(__name__)


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
        self._assistant_end = self._find_assistant_end()
        self._renders_inline_system = self._find_inline_system()

    @property
    def has_chat_template(self) -> bool:
        return self._assistant_end is not None

    @property
    def remembers(self) -> bool:
        """Whether what is encoded is remembered by pieces."""
        return self._remembering is not None

    def render(
        self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any], *, inline_system: bool = False
    ) -> str:
        """Return the prompt text; raises whatever the template raises on messages that it refuses.

        A conversation that ends with the assistant is continued: no generation prompt, and the end marker is cut off.
        ``inline_system``: system messages among the others move to the front where the template leaves them out.
        """
        if inline_system and not self._renders_inline_system:
            messages = merged_system(messages)
        continued = messages[-1].get("role") == "assistant"
        text: str = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=not continued, **kwargs
        )
        if continued and self._assistant_end:
            return text[: -len(self._assistant_end)]
        return text

    def encode(self, text: str, *, salt: str) -> bytes:
        """Return packed token ids, with the special tokens that the tokenizer adds by itself.

        ``salt`` is that of the tenant, whose earlier texts make this one faster. Raises ``UnicodeEncodeError`` for half
        a surrogate pair.
        """
        if self._remembering is not None:
            return self._remembering.encode(text, salt=salt)
        return self._encoder.encode(text)

    def look_up(self, text: str, *, salt: str) -> Sought | None:
        """Return what is remembered of a text's ids, None where nothing ever is. Without encoding anything: about a
        microsecond a kilobyte. Raises ``UnicodeEncodeError`` for half a surrogate pair.
        """
        return None if self._remembering is None else self._remembering.look_up(text, salt=salt)

    def token_ids(self, text: str, *, special: bool) -> list[int]:
        """Return a text's token ids, with the tokenizer's own special tokens or without. Remembers nothing."""
        ids: list[int]
        if self.thread_safe:  # without the GIL, and with nothing made but the ids
            backend = self._tokenizer.backend_tokenizer
            ids = backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
        else:
            ids = self._tokenizer.encode(text, add_special_tokens=special)
        return ids

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

    def _find_assistant_end(self) -> str | None:
        """What follows an assistant's text; found by rendering a marker. None when there is no usable template."""
        if getattr(self._tokenizer, "chat_template", None) is None:
            return None
        probe = [{"role": "user", "content": "placeholder"}, {"role": "assistant", "content": "sentinel"}]
        text: str = self._tokenizer.apply_chat_template(probe, tokenize=False)
        return text[text.find("sentinel") + len("sentinel") :]

    def _find_inline_system(self) -> bool:
        """Whether the template renders a system message where it stands; found by rendering a marker."""
        sentinel = "inline-system-sentinel"
        probe = [
            {"role": "system", "content": "system"},
            {"role": "user", "content": "user"},
            {"role": "system", "content": sentinel},
            {"role": "user", "content": "user"},
        ]
        try:
            return self._assistant_end is not None and sentinel in self.render(probe, {})
        except Exception:  # noqa: BLE001 - a template is a program of the model's: it may raise anything
            return False


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
