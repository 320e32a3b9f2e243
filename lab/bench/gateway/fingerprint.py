"""From a request's text to the keys of its blocks: cold prompts of 12 K and 128 K tokens, and a new turn of 1 K on top.

The prompts are chats of one-thousand-token messages in English, rendered by the model's own chat template. A cold
prompt has been seen by nobody; a new turn comes on a conversation whose earlier messages were tokenized before. Timed
is everything from the parsed messages to the hashes. The same is timed with a plain encoder without a memory beside it.
"""

import random
import time
from dataclasses import dataclass
from pathlib import Path

from gateway.fingerprint.tokenizer import ModelTokenizer
from kvcontrol.core import BlockHash, CacheIdentity, chain_hashes, root_hash
from kvcontrol.core.hashing import TOKEN_BYTES
from kvcontrol.tokenization import HuggingFaceEncoder, PieceMemory

_WORDS = Path(__file__).read_text(encoding="utf-8").split()
_BLOCK_TOKENS = 64
_SALT = "s"
_MEMORY_BYTES = 256 << 20
_HASHINGS = 10
"""Hashing is short: it is timed so often in each repetition."""
_SIZES = {"12k": 12, "128k": 128}

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FingerprintPlan:
    """Repetitions of each measurement; the median is reported."""

    repeats: int = 5
    seed: int = 0


def run(folder: Path, plan: FingerprintPlan) -> dict[str, float]:
    """Return metrics by name for the tokenizer in a model folder; raises what ``transformers`` raises without one."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    memory = PieceMemory(_MEMORY_BYTES)
    tokenizer = ModelTokenizer(loaded, memory)
    plain = HuggingFaceEncoder(loaded.backend_tokenizer)
    rng = random.Random(plan.seed)  # noqa: S311 - reproducible, not secret
    words = _words_for(1_000, plain, rng)
    _take(tokenizer, _chat(2, words, rng))  # first use sets things up
    metrics = {"tokenizer_vocab_tokens": float(loaded.vocab_size)}
    metrics |= _encoders(tokenizer, plain, words, rng)
    for name, turns in _SIZES.items():
        cold_s, turn_s, plain_s, hash_s = [], [], [], []
        for _ in range(plan.repeats):
            messages = _chat(turns, words, rng)
            cold_s.append(_take(tokenizer, messages))
            messages = [*messages, *_chat(1, words, rng)]
            turn_s.append(_take(tokenizer, messages))
            text = tokenizer.render(messages, {})
            started = time.perf_counter()
            packed = plain.encode(text)
            plain_s.append(time.perf_counter() - started)
            for _ in range(_HASHINGS):
                started = time.perf_counter()
                chain_hashes(_root(), packed[: turns * 1_000 * TOKEN_BYTES], _BLOCK_TOKENS)
                hash_s.append(time.perf_counter() - started)
        metrics |= {
            f"cold_{name}_ms": _median_ms(cold_s),
            f"turn_1k_on_{name}_ms": _median_ms(turn_s),
            f"hash_{name}_ms": _median_ms(hash_s),
            f"hash_{name}_mb_per_s": turns * 1_000 * TOKEN_BYTES / 1e3 / _median_ms(hash_s),
            f"plain_encode_{name}_ms": _median_ms(plain_s),
            f"plain_encode_over_turn_1k_on_{name}_ratio": _median_ms(plain_s) / _median_ms(turn_s),
        }
    return metrics


def _take(tokenizer: ModelTokenizer, messages: Messages) -> float:
    """Fingerprint a chat and return how long that took, in seconds."""
    started = time.perf_counter()
    packed = tokenizer.encode(tokenizer.render(messages, {}), salt=_SALT)
    chain_hashes(_root(), packed, _BLOCK_TOKENS)
    return time.perf_counter() - started


def _encoders(tokenizer: ModelTokenizer, plain: HuggingFaceEncoder, words: int, rng: random.Random) -> dict[str, float]:
    """Megabytes of new text a second, by the chosen encoder and by Hugging Face's, on the same texts."""
    texts = [_text(words, rng) for _ in range(40)]
    size_mb = sum(len(text) for text in texts) / 1e6
    started = time.perf_counter()
    for text in texts:
        plain.encode(text)
    plain_s = time.perf_counter() - started
    started = time.perf_counter()
    for text in texts:
        tokenizer.encode(text, salt=_SALT)
    chosen_s = time.perf_counter() - started
    return {"encode_mb_per_s": size_mb / chosen_s, "plain_encode_mb_per_s": size_mb / plain_s}


def _root() -> BlockHash:
    return root_hash(
        CacheIdentity(model="m", revision="r", kv_dtype="bfloat16", block_size_tokens=_BLOCK_TOKENS), salt=_SALT
    )


def _words_for(tokens: int, plain: HuggingFaceEncoder, rng: random.Random) -> int:
    """How many words make about so many tokens."""
    sample = _text(2_000, rng)
    return tokens * 2_000 // (len(plain.encode(sample)) // TOKEN_BYTES)


def _chat(turns: int, words: int, rng: random.Random) -> Messages:
    """A conversation of so many messages that ends with the user."""
    roles = ("user", "assistant")
    return [{"role": roles[left % 2], "content": _text(words, rng)} for left in reversed(range(turns))]


def _text(words: int, rng: random.Random) -> str:
    return " ".join(rng.choices(_WORDS, k=words))


def _median_ms(values_s: list[float]) -> float:
    return sorted(values_s)[len(values_s) // 2] * 1e3
