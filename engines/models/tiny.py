"""A tiny random Llama with a real tokenizer and chat template: for tests and demos, never for sense.

Two layers, 4 heads over 2 KV heads, a 1,024-token byte-level BPE and the ChatML template; 0.6 MB, fp32, made in about
a second. The same seed gives the same weights.
"""

import argparse
import inspect
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

NAME = "tiny-llama"
VOCAB_TOKENS = 1024
CONTEXT_TOKENS = 8192
RECIPE = "tiny-llama 1"
NEEDED_BYTES = 4_000_000

_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tiny(folder: Path, *, seed: int = 0) -> Path:
    """Write a Hugging Face model folder and return it; one that exists already is kept as it is.

    The folder appears whole or not at all: it is built beside its place and renamed. Raises ``OSError`` when it can't
    be written.
    """
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        built = Path(scratch) / "model"
        write_tiny(built, seed=seed)
        try:
            built.rename(folder)
        except OSError:
            if not (folder / "config.json").exists():  # someone else's build may have won the race; that one is as good
                raise
            shutil.rmtree(built)
    return folder


def write_tiny(folder: Path, *, seed: int = 0) -> None:
    """Fill a folder with the model; raises ``OSError`` when it can't be written."""
    write_tokenizer(folder)
    _write_model(folder, seed)


def write_tokenizer(folder: Path) -> Path:
    """Write its tokenizer and chat template alone, which needs no torch, and return the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_TOKENS,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    wrapped.chat_template = _CHATML
    wrapped.save_pretrained(folder)
    return folder


def _training_text() -> Iterator[str]:
    """English and code that every Python has: the source of a few of its own modules."""
    for module in (argparse, shutil, tempfile):
        yield inspect.getsource(module)


def _write_model(folder: Path, seed: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_TOKENS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=True,
        initializer_range=0.15,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float()
    model.save_pretrained(folder)
