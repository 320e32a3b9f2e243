"""``kvgate bench steps``: decode steps of a whole engine and first tokens, stock LMDeploy beside kvgate.

``python -m lab.bench.engine.steps MODE PLAN`` starts one engine in its process, measures, and prints one JSON object:

    decode       gaps between the tokens of one answer while all contexts are answered, for each list of contexts
    short        a prompt of ``short_tokens`` of which nothing is cached
    hit          a prompt of ``hit_tokens`` of which all is cached

Random token ids, greedy, in process: no HTTP and no tokenizer in the numbers. Each engine has the same pool and the
same prompts; ours has kvgate's hooks and the default pace of its device.
"""

import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvcontrol.core.quantisation import KVQuantisation
from lab.bench.engine.quantised import policy_of
from lab.bench.engine.visitor import Visit, Visitor
from lab.bench.timed_chat import BenchmarkError
from lab.report import Grid, Host, Report

NAME: Final = "steps"
MODES: Final = ("stock", "kvgate")
_SAMPLES: Final = 5
_CHILD_LIMIT_S: Final = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsPlan:
    """Token counts of contexts and prompts; ``answer_tokens`` of each answer while steps are timed."""

    model: str
    contexts: tuple[tuple[int, ...], ...] = ((8_000, 20_000, 40_000, 60_000, 90_000, 110_000), (57_344,) * 6)
    short_tokens: int = 64
    hit_tokens: int = 16_384
    answer_tokens: int = 200
    block_tokens: int = 64
    kv_quantisation: KVQuantisation = KVQuantisation.NONE
    vocab_tokens: int = 1_000
    """Token ids are below it."""


def run(plan: StepsPlan) -> Report:
    """Run the plan in a process for each engine, one after the other; raises ``BenchmarkError``."""
    found = {mode: _run_child(plan, mode) for mode in MODES}
    names = list(found["stock"])
    rows = tuple((name, found["stock"][name], found["kvgate"][name]) for name in names)
    metrics = {f"{mode}_{name}": value for mode, readings in found.items() for name, value in readings.items()}
    grid = Grid(name="figures", columns=("what", "LMDeploy", "kvgate"), rows=rows)
    return Report(bench=NAME, host=Host.here(), metrics=metrics, grids=(grid,))


def _run_child(plan: StepsPlan, mode: str) -> dict[str, float]:
    command = [sys.executable, "-m", __name__, mode, json.dumps(asdict(plan))]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_CHILD_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(f"the {mode} engine was not done after {_CHILD_LIMIT_S:.0f} s") from error
    if done.returncode != 0:
        raise BenchmarkError(f"the {mode} engine ended with {done.returncode}; its own output says why")
    readings: dict[str, float] = json.loads(done.stdout.rstrip().splitlines()[-1])
    return readings


async def _work(engine: Any, plan: StepsPlan) -> dict[str, float]:
    engine.start_loop()
    visitor = Visitor(engine, seed=1, ids=(3, plan.vocab_tokens - 1))
    found: dict[str, float] = {}
    for contexts in plan.contexts:
        prompts = [visitor.prompt(tokens) for tokens in contexts]
        for _ in range(2):  # computed and compiled, then cached: all answers begin at about the same time
            visits = await asyncio.gather(*(visitor.visit(prompt, answer=plan.answer_tokens) for prompt in prompts))
        name = f"decode_{len(contexts)}_of_{min(contexts)}_to_{max(contexts)}_ms"
        found[name] = _step_s(visits) * 1e3
    for _ in range(2):
        await visitor.visit(visitor.prompt(plan.short_tokens))
    short = [await visitor.visit(visitor.prompt(plan.short_tokens)) for _ in range(_SAMPLES)]
    found[f"ttft_{plan.short_tokens}_cold_s"] = statistics.median(visit.ttft_s for visit in short)
    cached = visitor.prompt(plan.hit_tokens)
    for _ in range(2):
        await visitor.visit(cached)
    hits = [await visitor.visit(cached) for _ in range(_SAMPLES)]
    found[f"ttft_{plan.hit_tokens}_cached_s"] = statistics.median(visit.ttft_s for visit in hits)
    return found


def _step_s(visits: list[Visit]) -> float:
    """Return the median gap between one answer's tokens while all are answered."""
    begin_s = max(visit.token_times_s[0] for visit in visits)
    end_s = min(visit.token_times_s[-1] for visit in visits)
    times = [moment for moment in visits[-1].token_times_s if begin_s <= moment <= end_s]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    if not gaps:
        raise RuntimeError("the answers were never under way all at once; give them more tokens")
    return statistics.median(gaps)


def child(mode: str, plan: StepsPlan) -> None:
    """Start an engine, do the plan's work and print its readings as the last line."""
    if mode == "stock":
        from lab.bench.engine.stock import prepare

        prepare()
    else:
        from engines.lmdeploy.launch import prepare as prepare_ours

        prepare_ours(serving=False)
    import torch
    from lmdeploy.messages import PytorchEngineConfig
    from lmdeploy.pytorch.engine.engine import Engine

    most = max(*(sum(contexts) for contexts in plan.contexts), plan.hit_tokens)
    sequences = max(len(contexts) for contexts in plan.contexts)
    settings: dict[str, Any] = {
        "device_type": "cuda" if torch.cuda.is_available() else "cpu",
        "block_size": plan.block_tokens,
        "num_gpu_blocks": (most + sequences * plan.answer_tokens) // plan.block_tokens + 64,
        "max_batch_size": 16,
        "enable_prefix_caching": True,
        "quant_policy": policy_of(plan.kv_quantisation),
        "session_len": max(*(max(contexts) for contexts in plan.contexts), plan.hit_tokens) + plan.answer_tokens + 64,
    }
    if torch.cuda.is_available():
        settings |= {"dtype": "bfloat16", "cudagraph_capture_batch_sizes": [1, 2, 4, 6, 8, 16]}
    engine = Engine.from_pretrained(plan.model, engine_config=PytorchEngineConfig(**settings))
    found = asyncio.run(_work(engine, plan))
    sys.stdout.write(f"\n{json.dumps(found)}\n")
    sys.stdout.flush()
    os._exit(0)  # the readings are out; an engine's teardown takes longer than it is worth


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    child(sys.argv[1], StepsPlan(**given | {"contexts": tuple(map(tuple, given["contexts"]))}))
