import json
from pathlib import Path

import pytest

from kvgate.failure import CommandError
from lab.bench.engine import tiers
from lab.bench.engine.tiers_report import Revisits, plan_for, run

LLAMA = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "vocab_size": 32_000,
}


def revisits(folder: Path, config: dict[str, int] | None = None, **changes: object) -> Revisits:
    (folder / "config.json").write_text(json.dumps(LLAMA if config is None else config))
    wanted: dict[str, object] = {
        "model": folder,
        "modes": ("stock", "ddr"),
        "contexts": 12,
        "context_tokens": None,
        "long_tokens": 0,
        "rounds": 3,
        "kv_blocks": None,
        "ddr_bytes": None,
        "nvme_dir": None,
        "piecewise_tokens": 0,
        "seed": 1,
    }
    return Revisits(**{**wanted, **changes})  # type: ignore[arg-type]


def test_the_pool_holds_about_half_of_the_contexts_and_ddr_all_of_them(tmp_path: Path) -> None:
    plan = plan_for(revisits(tmp_path), on_gpu=True)
    assert plan.context_tokens == 16_384
    assert plan.kv_blocks * plan.block_size < 0.6 * plan.contexts * plan.context_tokens
    token_bytes = 2 * 2 * 2 * 16 * 2  # keys and values, layers, KV heads, head size, bf16
    assert plan.ddr_bytes >= plan.contexts * plan.context_tokens * token_bytes


def test_the_pool_always_has_room_for_the_long_context(tmp_path: Path) -> None:
    plan = plan_for(revisits(tmp_path, contexts=2, context_tokens=512, long_tokens=4_096), on_gpu=False)
    assert plan.kv_blocks * plan.block_size >= 4_096 + 512


def test_prompts_are_made_of_ordinary_tokens(tmp_path: Path) -> None:
    plan = plan_for(revisits(tmp_path), on_gpu=False)
    assert 0 < plan.first_id < plan.last_id < LLAMA["vocab_size"]


def test_an_unknown_mode_is_named_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(CommandError) as refusal:
        run(revisits(tmp_path, modes=("stock", "tape")))
    assert "tape" in refusal.value.message
    assert "stock, ddr, nvme" in refusal.value.advice


def test_a_model_whose_kv_size_is_not_told_is_a_clear_message(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="num_hidden_layers"):
        plan_for(revisits(tmp_path, {"vocab_size": 9, "num_attention_heads": 1, "hidden_size": 8}), on_gpu=False)


def test_no_model_folder_is_a_clear_message(tmp_path: Path) -> None:
    wanted = revisits(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CommandError, match=r"config\.json can't be read"):
        plan_for(wanted, on_gpu=False)


def test_an_engine_that_is_not_done_in_time_is_a_clear_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "_CHILD_LIMIT_S", 0.01)
    with pytest.raises(CommandError, match=r"the ddr engine was not done after 0 s; give it less to do, with fewer"):
        run(revisits(tmp_path, modes=("ddr",)))
