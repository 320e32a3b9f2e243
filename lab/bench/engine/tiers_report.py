"""``kvgate bench tiers``: what a revisit costs when HBM was too small, stock LMDeploy beside the tiers."""

import json
from dataclasses import dataclass
from pathlib import Path

from kvcontrol.core.quantisation import KVQuantisation
from kvgate.failure import CommandError
from kvgate.host.machine import gpus
from lab.bench.engine import tiers

NAME = "tiers"
_GPU_CONTEXT_TOKENS = 16_384
_CPU_CONTEXT_TOKENS = 768
_GPU_BLOCK_TOKENS = 64
_CPU_BLOCK_TOKENS = 16
_SPECIAL_IDS = 1_000
"""Token ids below are left alone: they may be special, or end a sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Revisits:
    """What to run; None is a default that depends on the machine."""

    model: Path
    modes: tuple[str, ...]
    contexts: int
    context_tokens: int | None
    long_tokens: int
    rounds: int
    kv_blocks: int | None
    ddr_bytes: int | None
    nvme_dir: Path | None
    piecewise_tokens: int
    kv_quantisation: KVQuantisation = KVQuantisation.NONE
    seed: int


def run(wanted: Revisits) -> dict[str, float]:
    """Run all engines, one after the other; raises ``CommandError``."""
    unknown = [mode for mode in wanted.modes if mode not in tiers.MODES]
    if unknown or not wanted.modes:
        known = ", ".join(tiers.MODES)
        raise CommandError(f"--modes: {', '.join(unknown) or 'none'} is not known", f"give some of {known}")
    plan = plan_for(wanted, on_gpu=bool(gpus()))
    try:
        return tiers.run(plan, wanted.modes)
    except RuntimeError as error:
        raise CommandError(str(error)) from error


def plan_for(wanted: Revisits, *, on_gpu: bool) -> tiers.Plan:
    """Fill in the defaults: a pool for half of the contexts, DDR for all of them and half as many again."""
    config = _config(wanted.model)
    tokens = wanted.context_tokens or (_GPU_CONTEXT_TOKENS if on_gpu else _CPU_CONTEXT_TOKENS)
    block = _GPU_BLOCK_TOKENS if on_gpu else _CPU_BLOCK_TOKENS
    needed = max(tokens * wanted.contexts // 2, wanted.long_tokens + tokens, tokens * 2)
    kept = tokens * wanted.contexts + 2 * wanted.long_tokens
    # The engine keeps KV in bf16 on a GPU and in fp32 on a CPU.
    token_bytes = _kv_numbers_of_a_token(config) * (2 if on_gpu else 4)
    return tiers.Plan(
        model=str(wanted.model),
        contexts=wanted.contexts,
        context_tokens=tokens,
        long_tokens=wanted.long_tokens,
        rounds=wanted.rounds,
        kv_blocks=wanted.kv_blocks or needed // block + 2 * 16,
        block_size=block,
        max_batch_size=16 if on_gpu else 8,
        ddr_bytes=wanted.ddr_bytes or kept * token_bytes * 3 // 2,
        nvme_bytes=kept * token_bytes * 2,
        nvme_path="" if wanted.nvme_dir is None else str(wanted.nvme_dir),
        seed=wanted.seed,
        pause_s=0.3,
        piecewise_tokens=wanted.piecewise_tokens,
        kv_quantisation=wanted.kv_quantisation,
        decode_tokens=2_000 if on_gpu else 120,
        first_id=_SPECIAL_IDS if int(config["vocab_size"]) > 2 * _SPECIAL_IDS else 5,
        last_id=int(config["vocab_size"]) - _SPECIAL_IDS if int(config["vocab_size"]) > 2 * _SPECIAL_IDS else 999,
    )


def _config(model: Path) -> dict[str, int]:
    try:
        config: dict[str, int] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"--model {model}: config.json can't be read: {error}") from error
    return config


def _kv_numbers_of_a_token(config: dict[str, int]) -> int:
    """Keys and values of one token in all layers."""
    try:
        heads = config["num_attention_heads"]
        head = config.get("head_dim") or config["hidden_size"] // heads
        return 2 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * head
    except KeyError as error:
        raise CommandError(f"the model's config.json lacks {error}: say --ddr and --kv-blocks yourself") from error
