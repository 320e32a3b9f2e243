"""Tiny random models and what transformers itself makes of a prompt."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def build_tiny_qwen2(folder: Path) -> Path:
    """Write a tiny random Qwen2 (biased QKV, another decoder class than Llama), without a tokenizer of its own."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from engines.models.tiny import VOCAB_TOKENS, build_tiny

    llama = build_tiny(folder.parent / "tokenizer-of-tiny-llama")
    config = Qwen2Config(
        vocab_size=VOCAB_TOKENS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.15,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        Qwen2ForCausalLM(config).float().save_pretrained(folder)
    AutoTokenizer.from_pretrained(llama).save_pretrained(folder)
    return folder


def greedy_reference(folder: Path, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """Return transformers' own greedy continuation of each prompt, run one by one in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # the end token is a token like any other here
    continuations = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
        continuations.append(out[0, len(prompt) :].tolist())
    return continuations


def random_prompt(tokens: int, seed: int, *, first: int = 3, last: int = 1023) -> list[int]:
    """Return ``tokens`` token ids without special ones, fixed by ``seed``."""
    import random

    chosen = random.Random(seed)  # noqa: S311 - test data
    return [chosen.randint(first, last) for _ in range(tokens)]
