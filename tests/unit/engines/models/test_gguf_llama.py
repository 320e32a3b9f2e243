"""A tiny Llama is written as GGUF, in GGUF's order of rows, and must come back as transformers has it."""

import json
from pathlib import Path

import numpy as np
import pytest

from engines.models.gguf_llama import UnsupportedModelError, convert
from engines.models.tiny import build_tiny

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def interleaved(rows: "np.ndarray", heads: int) -> "np.ndarray":
    """What llama.cpp's converter does to query and key projections, written the other way round."""
    out = np.empty_like(rows)
    size = rows.shape[0] // heads
    for head in range(heads):
        for pair in range(size // 2):
            out[head * size + 2 * pair] = rows[head * size + pair]
            out[head * size + 2 * pair + 1] = rows[head * size + size // 2 + pair]
    return out


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(model: Path, path: Path, *, architecture: str = "llama") -> None:
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((model / "config.json").read_text())
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config["vocab_size"])
    vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if number < 3 else 1 for number in range(len(vocabulary))])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_add_space_prefix(value=False)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_chat_template((model / "chat_template.jinja").read_text())
    for name, values in load_file(model / "model.safetensors").items():
        if name == "model.embed_tokens.weight":
            writer.add_tensor("token_embd.weight", values)
        elif name == "model.norm.weight":
            writer.add_tensor("output_norm.weight", values)
        else:
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(part)
            rows = interleaved(values, heads) if heads else values
            writer.add_tensor(f"blk.{layer}.{GGUF_NAMES[part]}.weight", np.ascontiguousarray(rows))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def converted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    write_gguf(model, folder / "in.gguf")
    out = folder / "out"
    out.mkdir()
    convert(folder / "in.gguf", out)
    return out


def test_the_weights_come_back_bit_for_bit(model: Path, converted: Path) -> None:
    from safetensors.numpy import load_file

    expected, found = load_file(model / "model.safetensors"), load_file(converted / "model.safetensors")
    assert expected.keys() == found.keys()
    assert [name for name in expected if not np.array_equal(expected[name], found[name])] == []


def test_transformers_reads_the_folder_and_computes_the_same(model: Path, converted: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids).logits
        found = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)(ids).logits
    assert torch.equal(expected, found)


def test_the_tokenizer_says_the_same_and_splits_digits(model: Path, converted: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = AutoTokenizer.from_pretrained(converted), AutoTokenizer.from_pretrained(model)
    text = "<|im_start|>user\ndef f(self): return None # na\u00efve \u65e5\u672c<|im_end|>"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == text
    assert ours.eos_token_id == 2
    assert len(ours.encode("1234")) == 4, "each digit is a token"
    messages = [{"role": "user", "content": "hello"}]
    assert ours.apply_chat_template(messages, tokenize=False) == theirs.apply_chat_template(messages, tokenize=False)


def test_generation_stops_at_the_end_of_a_turn(converted: Path) -> None:
    assert json.loads((converted / "generation_config.json").read_text())["eos_token_id"] == 2


def test_another_architecture_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    write_gguf(model, tmp_path / "in.gguf", architecture="mamba")
    with pytest.raises(UnsupportedModelError, match="holds a mamba model"):
        convert(tmp_path / "in.gguf", tmp_path)
