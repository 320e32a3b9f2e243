"""A Llama model in a GGUF file as a Hugging Face folder in fp32.

Done by hand rather than through transformers, which takes ten times as long, wants torch, and can't save what it read
from a GGUF. The weights are dequantised by the gguf package itself; GGUF interleaves the two halves of each rotary
pair in the query and key projections, Hugging Face keeps them apart, so those rows are put back in order.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SPECIAL = 3
"""GGUF's token type for control tokens."""

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")

_DIGITS_ALONE = frozenset({"smollm"})
"""Pre-tokenizers, by GGUF's names, that split numbers into single digits before GPT-2's rule."""


class UnsupportedModelError(ValueError):
    """The file holds something that this converter doesn't know; the message names it."""


def convert(gguf: Path, folder: Path) -> None:
    """Write config, tokenizer, chat template and weights into ``folder``. Raises ``UnsupportedModelError``."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama":
        raise UnsupportedModelError(f"{gguf.name} holds a {fields['general.architecture']} model, only llama is known")
    _write_weights(reader, fields, folder)
    _write_config(fields, folder, tied=not any(tensor.name == "output.weight" for tensor in reader.tensors))
    _write_tokenizer(fields, folder)


def _write_weights(reader: Any, fields: dict[str, Any], folder: Path) -> None:
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights: dict[str, NDArray[np.float32]] = {}
    for tensor in reader.tensors:
        name, part = _name_of(tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        weights[name] = np.ascontiguousarray(_halves_apart(values, heads[part]) if part in heads else values)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _name_of(gguf_name: str) -> tuple[str, str]:
    """Return a tensor's Hugging Face name, and which part of a layer it is (for others, its own name)."""
    if layer := _LAYER.fullmatch(gguf_name):
        number, part = layer.groups()
        if part in _LAYER_NAMES:
            return f"model.layers.{number}.{_LAYER_NAMES[part]}.weight", part
    top = gguf_name.removesuffix(".weight")
    if top in _TOP_NAMES:
        return f"{_TOP_NAMES[top]}.weight", top
    raise UnsupportedModelError(f"the tensor {gguf_name} has no place in a Llama model")


def _halves_apart(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo GGUF's interleaving of rotary pairs: within each head, all first elements before all second ones."""
    pairs = rows.shape[0] // heads // 2
    return rows.reshape(heads, pairs, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _write_config(fields: dict[str, Any], folder: Path, *, tied: bool) -> None:
    theta = fields["llama.rope.freq_base"]
    tokens = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "torch_dtype": "float32",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "vocab_size": fields["llama.vocab_size"],
        "tie_word_embeddings": tied,
        **tokens,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", tokens)


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if fields["tokenizer.ggml.model"] != "gpt2":
        raise UnsupportedModelError(
            f"the tokenizer is {fields['tokenizer.ggml.model']}, only gpt2 (byte-level BPE) is known"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=bool(fields["tokenizer.ggml.add_space_prefix"]))]
    if fields["tokenizer.ggml.pre"] in _DIGITS_ALONE:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
    }
    rest = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", names | rest)
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"])


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
