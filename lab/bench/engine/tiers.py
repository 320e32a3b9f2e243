"""What a revisit costs when the pool was too small: stock LMDeploy beside tiers below it, in one run.

``python -m lab.bench.engine.tiers PLAN`` starts one engine in its process, does the work and prints its readings as one
JSON object. The work is contexts visited in turn over a pool that holds about half of them, so that with LRU every
revisit finds its context evicted:

    cold        the first round
    revisit     the rounds after: computed again (stock), loaded from DDR or NVMe (tiers)
    hbm_hit     the last context at once again: what a revisit costs at best
    itl         gaps between the tokens of a running decode, alone and while all contexts are revisited
    long        one long context: cold, its own hit, and again after a flood

Random token ids, fresh for every engine run (``--seed``), greedy, in process: no HTTP and no tokenizer in the numbers.
Tokens after a hit in HBM and after a restore are compared; cold ones are not, their chunks have other shapes.
"""

import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvcontrol.core.quantisation import KVQuantisation
from lab.bench.engine.quantised import policy_of
from lab.bench.engine.visitor import Visitor

MODES = ("stock", "ddr", "nvme")
_SUFFIX_TOKENS = 64
_HIT_SAMPLES = 12
_LONG_SAMPLES = 3
_SETTLE_S = 1.5
_CHILD_LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One engine's work. ``kv_blocks`` blocks of ``block_size`` tokens are the pool; sizes in bytes."""

    model: str
    contexts: int
    context_tokens: int
    long_tokens: int
    rounds: int
    kv_blocks: int
    block_size: int
    max_batch_size: int
    ddr_bytes: int
    nvme_bytes: int
    nvme_path: str
    seed: int
    pause_s: float
    piecewise_tokens: int
    kv_quantisation: KVQuantisation = KVQuantisation.NONE
    decode_tokens: int
    first_id: int
    last_id: int


async def work(engine: Any, plan: Plan) -> dict[str, Any]:
    """Do the plan's work on one engine and return its raw readings."""
    visitor = Visitor(engine, seed=plan.seed, ids=(plan.first_id, plan.last_id))
    for _ in range(2):  # what compiles or grows at first use does so here
        warm = visitor.prompt(plan.context_tokens)
        await visitor.visit(warm)
        await visitor.visit(warm)
    # Two decodes at once have kernels of their own; Triton would compile them within a running decode: 0.65 s.
    await asyncio.gather(*(visitor.visit(visitor.prompt(plan.block_size * 2), answer=32) for _ in range(2)))
    contexts = [visitor.prompt(plan.context_tokens - _SUFFIX_TOKENS) for _ in range(plan.contexts)]
    found: dict[str, Any] = {"rounds": []}
    for _ in range(plan.rounds):
        visits = []
        for context in contexts:
            visits.append(await visitor.visit(context + visitor.prompt(_SUFFIX_TOKENS)))
            await asyncio.sleep(plan.pause_s)
        found["rounds"].append({"ttft_s": [each.ttft_s for each in visits], "cached": [each.cached for each in visits]})
    hits = [await visitor.visit(contexts[-1] + visitor.prompt(_SUFFIX_TOKENS)) for _ in range(_HIT_SAMPLES)]
    found["hbm_hit_ttft_s"] = [each.ttft_s for each in hits]
    found["exact"] = await _exactness(visitor, contexts, plan)
    found["itl"] = await _decode_beside(visitor, contexts, plan)
    started = time.perf_counter()
    burst = await asyncio.gather(*(visitor.visit(context + visitor.prompt(_SUFFIX_TOKENS)) for context in contexts))
    found["burst_s"] = time.perf_counter() - started
    found["burst_cached"] = [each.cached for each in burst]
    if plan.long_tokens:
        found["long"] = await _long(visitor, plan)
    return found


async def _exactness(visitor: Visitor, contexts: Sequence[list[int]], plan: Plan) -> list[bool]:
    """Whether a prompt's greedy tokens are the same out of HBM and after everything else went through the pool."""
    equal = []
    for _ in range(3):
        prompt = visitor.prompt(plan.context_tokens)
        await visitor.visit(prompt, answer=1)
        hit = await visitor.visit(prompt, answer=16)
        for context in contexts:
            await visitor.visit(context + visitor.prompt(_SUFFIX_TOKENS), answer=1)
        await asyncio.sleep(plan.pause_s)
        restored = await visitor.visit(prompt, answer=16)
        equal.append(hit.tokens == restored.tokens)
    return equal


async def _decode_beside(visitor: Visitor, contexts: Sequence[list[int]], plan: Plan) -> dict[str, list[float]]:
    """Gaps between a decode's tokens, alone and while every context is revisited."""
    decode = asyncio.create_task(visitor.visit(visitor.prompt(plan.context_tokens // 2), answer=plan.decode_tokens))
    await asyncio.sleep(_SETTLE_S)
    alone_from = time.perf_counter()
    await asyncio.sleep(_SETTLE_S)
    beside_from = time.perf_counter()
    for context in contexts:
        await visitor.visit(context + visitor.prompt(_SUFFIX_TOKENS), answer=1)
    beside_to = time.perf_counter()
    times = (await decode).token_times_s
    gaps = list(itertools.pairwise(times))
    return {
        "alone": [b - a for a, b in gaps if alone_from <= a and b <= beside_from],
        "beside": [b - a for a, b in gaps if beside_from <= a and b <= beside_to],
    }


async def _long(visitor: Visitor, plan: Plan) -> dict[str, Any]:
    """One long context: cold, hit, and again when other prompts have taken its place in the pool."""
    prompt = visitor.prompt(plan.long_tokens)
    cold = await visitor.visit(prompt)
    await asyncio.sleep(plan.pause_s)
    hit = await visitor.visit(prompt)
    again = []
    for _ in range(_LONG_SAMPLES):
        flood = min(plan.long_tokens, (plan.kv_blocks - 16) * plan.block_size - 64)
        await visitor.visit(visitor.prompt(flood), answer=1)
        await asyncio.sleep(plan.pause_s)
        again.append(await visitor.visit(prompt))
    return {
        "cold_s": cold.ttft_s,
        "hit_s": hit.ttft_s,
        "again_s": [each.ttft_s for each in again],
        "again_cached": [each.cached for each in again],
        "equal": hit.tokens == again[-1].tokens,
    }


def child(plan: Plan) -> None:
    """Run one engine, configured by this process's environment, and print its readings."""
    from engines.lmdeploy.launch import prepare

    prepare(serving=False)
    import torch
    from lmdeploy.messages import PytorchEngineConfig
    from lmdeploy.pytorch.engine.engine import Engine

    from engines.lmdeploy.agent import agent_of
    from kvcontrol.core.garbage import freeze_garbage

    cuda = torch.cuda.is_available()
    settings: dict[str, Any] = {
        "device_type": "cuda" if cuda else "cpu",
        "block_size": plan.block_size,
        "num_gpu_blocks": plan.kv_blocks,
        "max_batch_size": plan.max_batch_size,
        "enable_prefix_caching": True,
        "session_len": max(plan.long_tokens, plan.context_tokens) + 1024,
        "quant_policy": policy_of(plan.kv_quantisation),
    }
    if cuda:
        settings |= {"dtype": "bfloat16", "cudagraph_capture_batch_sizes": [1, plan.max_batch_size]}
    if plan.piecewise_tokens:
        settings["piecewise_cudagraph_max_tokens"] = plan.piecewise_tokens
    engine = Engine.from_pretrained(plan.model, engine_config=PytorchEngineConfig(**settings))
    if agent_of(engine) is not None:  # as in an engine's own process
        freeze_garbage()

    async def run() -> dict[str, Any]:
        engine.start_loop()
        return await work(engine, plan)

    found = asyncio.run(run())
    agent = agent_of(engine)
    offload = None if agent is None else agent.stats().offload
    if offload is not None:
        found["stats"] = {
            f"{path}_gb_per_s": each.bandwidth_bytes_per_s / 1e9 for path, each in offload.paths.items()
        } | {"failed_loads": offload.failed_loads, "declined_loads": offload.declined_loads}
    sys.stdout.write(f"\n{json.dumps(found)}\n")
    sys.stdout.flush()
    os._exit(0)  # the readings are out; an engine's teardown takes longer than it is worth


def run(plan: Plan, modes: Sequence[str]) -> dict[str, float]:
    """Run the plan once for each mode, one after the other, and return the metrics; raises ``RuntimeError``."""
    found = {mode: _run_child(plan, mode) for mode in modes}
    metrics: dict[str, float] = {}
    for mode, readings in found.items():
        metrics |= {f"{mode}_{name}": value for name, value in _metrics(readings).items()}
    if "stock" in found:
        for mode in found:
            if mode != "stock":
                metrics[f"{mode}_revisit_speedup_ratio"] = (
                    metrics["stock_revisit_ttft_s"] / metrics[f"{mode}_revisit_ttft_s"]
                )
                metrics[f"{mode}_cold_cost_pct"] = (
                    metrics[f"{mode}_cold_ttft_s"] / metrics["stock_cold_ttft_s"] - 1
                ) * 100
    return metrics


def _metrics(found: dict[str, Any]) -> dict[str, float]:
    cold, *revisits = found["rounds"]
    times = [each for visits in revisits for each in visits["ttft_s"]]
    cached = [each for visits in revisits for each in visits["cached"]]
    metrics = {
        "cold_ttft_s": statistics.median(cold["ttft_s"]),
        "revisit_ttft_s": statistics.median(times),
        "revisit_ttft_max_s": max(times),
        "revisit_cached_tokens": statistics.median(cached),
        "hbm_hit_ttft_s": statistics.median(found["hbm_hit_ttft_s"]),
        "burst_s": found["burst_s"],
        "restored_equal_ratio": sum(found["exact"]) / len(found["exact"]),
    }
    for name, gaps in found["itl"].items():
        if len(gaps) > 1:
            metrics[f"itl_{name}_p50_ms"] = statistics.median(gaps) * 1e3
            metrics[f"itl_{name}_p99_ms"] = statistics.quantiles(gaps, n=100, method="inclusive")[-1] * 1e3
            metrics[f"itl_{name}_max_ms"] = max(gaps) * 1e3
    if "long" in found:
        metrics |= {
            "long_cold_ttft_s": found["long"]["cold_s"],
            "long_hit_ttft_s": found["long"]["hit_s"],
            "long_revisit_ttft_s": statistics.median(found["long"]["again_s"]),
            "long_revisit_cached_tokens": statistics.median(found["long"]["again_cached"]),
            "long_restored_equal_ratio": float(found["long"]["equal"]),
        }
    return metrics | dict(found.get("stats") or {})


def _run_child(plan: Plan, mode: str) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVGATE_ENGINE_DDR")}
    if mode != "stock":
        environment["KVGATE_ENGINE_DDR_BYTES"] = str(plan.ddr_bytes)
    with tempfile.TemporaryDirectory(prefix="kvgate-bench-", dir=plan.nvme_path or None) as folder:
        if mode == "nvme":
            # DDR holds one context and a half: a revisit's blocks have gone to the file
            environment["KVGATE_ENGINE_DDR_BYTES"] = str(plan.ddr_bytes // plan.contexts * 3 // 2)
            environment["KVGATE_ENGINE_NVME_PATH"] = folder
            environment["KVGATE_ENGINE_NVME_BYTES"] = str(plan.nvme_bytes)
            environment["KVGATE_ENGINE_WRITE_MODE"] = "write_through"
        command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, json.dumps(asdict(plan))]
        sys.stderr.write(f"{mode} ...\n")
        try:
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, timeout=_CHILD_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(
                f"the {mode} engine was not done after {_CHILD_LIMIT_S:.0f} s; give it less to do, "
                "with fewer or shorter contexts or fewer rounds, or a smaller model"
            ) from error
    if done.returncode != 0:
        raise RuntimeError(f"the {mode} engine ended with {done.returncode}; its own output says why")
    readings: dict[str, Any] = json.loads(done.stdout.rstrip().splitlines()[-1])
    return readings


if __name__ == "__main__":
    child(Plan(**json.loads(sys.argv[1])))
