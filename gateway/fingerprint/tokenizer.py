"""The model's own tokenizer and chat template, used exactly as LMDeploy's ``HFChatTemplate`` does."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.errors import SettingsError


class ModelTokenizer:
    """Renders and encodes. Both hold the calling thread; ``encode`` lets the GIL go where the tokenizer is a fast one.

    A fast tokenizer is used through its Rust core: Hugging Face's own ``encode`` keeps the GIL for the whole text and
    changes the tokenizer's truncation state, which two threads must not do at once.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        self._assistant_end = self._find_assistant_end()

    @property
    def has_chat_template(self) -> bool:
        return self._assistant_end is not None

    @property
    def thread_safe(self) -> bool:
        """Whether several threads may encode at once."""
        return self._backend is not None

    def render(self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]) -> str:
        """Return the prompt text; raises whatever the template raises on messages that it refuses.

        A conversation that ends with the assistant is continued: no generation prompt, and the end marker is cut off.
        """
        continued = messages[-1].get("role") == "assistant"
        text: str = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=not continued, **kwargs
        )
        if continued and self._assistant_end:
            return text[: -len(self._assistant_end)]
        return text

    def encode(self, text: str) -> list[int]:
        """Return token ids with the special tokens that the tokenizer adds by itself."""
        if self._backend is not None:
            ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=True)[0].ids
            return ids
        return list(self._tokenizer.encode(text, add_special_tokens=True))

    def _find_assistant_end(self) -> str | None:
        """What follows an assistant's text; found by rendering a marker. None when there is no usable template."""
        if getattr(self._tokenizer, "chat_template", None) is None:
            return None
        probe = [{"role": "user", "content": "placeholder"}, {"role": "assistant", "content": "sentinel"}]
        text: str = self._tokenizer.apply_chat_template(probe, tokenize=False)
        return text[text.find("sentinel") + len("sentinel") :]


def load_tokenizer(folder: Path) -> ModelTokenizer:
    """Read a model folder's tokenizer; takes seconds. Raises ``SettingsError`` when it has none that can be used."""
    from transformers import AutoTokenizer

    try:
        return ModelTokenizer(AutoTokenizer.from_pretrained(str(folder), local_files_only=True))
    except Exception as error:  # transformers raises anything on a folder that is not right
        raise SettingsError(
            f"settings: tokenizer = {str(folder)!r}: no usable tokenizer with a chat template there: {error}"
        ) from error


__all__ = ["ModelTokenizer", "load_tokenizer"]
