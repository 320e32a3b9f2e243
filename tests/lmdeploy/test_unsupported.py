"""What the CPU back end lacks is refused by name when the model is built, never computed wrongly."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import LocalEngine

pytestmark = pytest.mark.engine

PLAIN: dict[str, Any] = {
    "num_heads": 4,
    "head_dim": 16,
    "scale": None,
    "num_kv_heads": 2,
    "v_head_dim": 16,
    "alibi": False,
    "sliding_window": None,
    "logit_softcapping": 0.0,
    "causal": True,
    "use_flash_mla": False,
    "mla_index_topk": None,
    "learnable_sink": False,
    "block_sparse_size": 1,
}


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("use_flash_mla", True, "MLA"),
        ("v_head_dim", 8, "MLA"),
        ("sliding_window", 64, "sliding-window attention .window 64."),
        ("sliding_window", (64, 0), "sliding-window"),
        ("alibi", True, "ALiBi"),
        ("learnable_sink", True, "attention sinks"),
        ("logit_softcapping", 30.0, "logit soft-capping"),
        ("mla_index_topk", 8, "sparse attention indices"),
        ("block_sparse_size", 4, "block-sparse attention"),
    ],
)
def test_an_attention_variant_is_refused_by_name(field: str, value: object, named: str) -> None:
    from lmdeploy.pytorch.backends.attention import PagedAttentionBuildSpec

    from engines.lmdeploy.cpu.attention import UnsupportedModelError, build_attention

    with pytest.raises(UnsupportedModelError, match=named):
        build_attention(PagedAttentionBuildSpec(**{**PLAIN, field: value}))


@pytest.mark.parametrize("window", [None, -1])
def test_no_window_is_no_obstacle(window: int | None) -> None:
    from lmdeploy.pytorch.backends.attention import PagedAttentionBuildSpec

    from engines.lmdeploy.cpu.attention import build_attention

    build_attention(PagedAttentionBuildSpec(**{**PLAIN, "sliding_window": window}))


def test_a_model_with_a_sliding_window_does_not_start(tiny_llama: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoTokenizer, MistralConfig, MistralForCausalLM

    from engines.lmdeploy.cpu.attention import UnsupportedModelError

    config = MistralConfig(
        vocab_size=1024,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=64,
    )
    with torch.random.fork_rng(devices=[]):
        MistralForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="sliding-window"):
        LocalEngine.start(tmp_path)
