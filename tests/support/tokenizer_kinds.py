"""Tokenizers of every kind that LMDeploy serves, small and made here: what differs is how they spell characters."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from engines.models.tiny import write_tokenizer

# ruff: noqa: S106 - names of tokens, no passwords
_TEXTS: Final = (
    "the quick brown fox jumps over the lazy dog",
    "def value(self, name: str) -> str:\n    return self.values[name]  # an option",
    "It's 1234.5 miles, isn't it? No: 99!",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z",
)


def byte_level(folder: Path) -> Path:
    """GPT's kind (SmolLM2, Qwen, Llama 3): every byte has a character that stands for it."""
    return _with_config(write_tokenizer(folder))


def byte_fallback(folder: Path) -> Path:
    """SentencePiece's kind (Llama 2, Mistral, Gemma): a character that is in no token becomes tokens like <0xE4>."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(_TEXTS, trainer)
    stored = json.loads(tokenizer.to_str())
    stored["added_tokens"] = [token for token in stored["added_tokens"] if not token["content"].startswith("<0x")]
    return _fast(folder, Tokenizer.from_str(json.dumps(stored)), bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def word_piece(folder: Path) -> Path:
    """BERT's kind: blanks aren't stored, and what is unknown is a token of its own."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return _fast(folder, tokenizer, bos_token="[CLS]", eos_token="[SEP]", unk_token="[UNK]")


KINDS: Final[dict[str, Callable[[Path], Path]]] = {
    "byte-level": byte_level,
    "byte-fallback": byte_fallback,
    "word-piece": word_piece,
}


def _fast(folder: Path, tokenizer: Any, **special: str) -> Path:
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    wrapped.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    wrapped.save_pretrained(folder)
    return _with_config(folder)


def _with_config(folder: Path) -> Path:
    """Add what LMDeploy looks at before it loads a tokenizer."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


__all__ = ["KINDS", "byte_fallback", "byte_level", "word_piece"]
