"""``kvgate bench overtaking``: a revisit with few tokens to compute, which comes beside a long cold prompt.

``python -m lab.bench.engine.overtaking PLAN`` starts one engine in its process and does the same work by turns with and
without overtaking (the pace's ``overtaken_share`` of 1 and 0), ``rounds`` times each:

    a context is computed, so that its blocks are cached
    a long cold prompt begins, and its first chunk is computed
    the revisit (the context and ``new_tokens`` more) comes beside it

Random token ids, greedy, in process: no HTTP and no tokenizer in the numbers. Before each turn the prefix cache is
emptied, and both turns of a round get the same prompts: their tokens must be the same. On a GPU later tokens may differ
by rounding, as a decode step of two sequences is computed otherwise than two of one; first tokens may not.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any, Final

from lab.bench.engine.visitor import Visit, Visitor
from lab.bench.timed_chat import BenchmarkError
from lab.report import Grid, Host, Report

NAME: Final = "overtaking"
SHARES: Final = {"one_after_the_other": 0.0, "overtaking": 1.0}
_CHILD_LIMIT_S: Final = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OvertakingPlan:
    """Token counts; ``chunk_tokens`` is the most that one prefill step computes."""

    model: str
    long_tokens: int = 60_000
    context_tokens: int = 55_000
    new_tokens: int = 5_000
    chunk_tokens: int = 2_048
    block_tokens: int = 64
    rounds: int = 5
    vocab_tokens: int = 1_000
    """Token ids are below it."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """What became of both prompts."""

    revisit: Visit
    long: Visit

    @property
    def first_tokens(self) -> tuple[int, int]:
        return self.revisit.tokens[0], self.long.tokens[0]

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self.revisit.tokens), tuple(self.long.tokens)


def run(plan: OvertakingPlan) -> Report:
    """Run the plan in a process of its own; raises ``BenchmarkError``."""
    command = [sys.executable, "-m", __name__, json.dumps(asdict(plan))]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_CHILD_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(f"the engine was not done after {_CHILD_LIMIT_S:.0f} s; give it fewer tokens") from error
    if done.returncode != 0:
        raise BenchmarkError(f"the engine ended with {done.returncode}; its own output says why")
    found = json.loads(done.stdout.rstrip().splitlines()[-1])
    columns = ("turn", "revisit, TTFT median s", "revisit, TTFT maximum s", "long prompt, TTFT median s")
    rows = tuple((name.replace("_", " "), *(found[f"{name}_{each}"] for each in _FIGURES)) for name in SHARES)
    return Report(
        bench=NAME, host=Host.here(), metrics=found, grids=(Grid(name="first_tokens", columns=columns, rows=rows),)
    )


_FIGURES: Final = ("revisit_ttft_s", "revisit_ttft_max_s", "long_ttft_s")


async def _turn(engine: Any, visitor: Visitor, prompts: tuple[list[int], list[int], list[int]], share: float) -> _Turn:
    from engines.lmdeploy.schedule.pacing import pacer_of
    from kvcontrol.scheduler_ir.pacing import ALTERNATE, make_pace

    context, cold, revisit = prompts
    scheduler = engine.scheduler
    pacer = pacer_of(scheduler)
    assert pacer is not None  # noqa: S101 - the launcher's hooks
    pacer.swap(make_pace(ALTERNATE, {"overtaken_share": share}))
    scheduler.block_trie.evict(1 << 30)
    await visitor.visit(context)
    tick = scheduler.scheduler_tick
    long = asyncio.create_task(visitor.visit(cold))
    while scheduler.scheduler_tick <= tick:  # noqa: ASYNC110 - its first chunk was sent
        await asyncio.sleep(0)
    return _Turn(*await asyncio.gather(visitor.visit(revisit), long))


async def _work(engine: Any, plan: OvertakingPlan) -> dict[str, float]:
    engine.start_loop()
    visitor = Visitor(engine, seed=1, ids=(3, plan.vocab_tokens - 1))
    turns: dict[str, list[_Turn]] = {name: [] for name in SHARES}
    equal = equal_first = 0
    for number in range(plan.rounds + 1):
        context = visitor.prompt(plan.context_tokens)
        prompts = context, visitor.prompt(plan.long_tokens), context + visitor.prompt(plan.new_tokens)
        order = list(SHARES)[:: -1 if number % 2 else 1]
        seen = {name: await _turn(engine, visitor, prompts, SHARES[name]) for name in order}
        if number:  # the first round compiles
            equal += len({turn.tokens for turn in seen.values()}) == 1
            equal_first += len({turn.first_tokens for turn in seen.values()}) == 1
            for name, turn in seen.items():
                turns[name].append(turn)
    found: dict[str, float] = {
        "equal_tokens_ratio": equal / plan.rounds,
        "equal_first_tokens_ratio": equal_first / plan.rounds,
    }
    for name, each in turns.items():
        found[f"{name}_revisit_ttft_s"] = statistics.median(turn.revisit.ttft_s for turn in each)
        found[f"{name}_revisit_ttft_max_s"] = max(turn.revisit.ttft_s for turn in each)
        found[f"{name}_long_ttft_s"] = statistics.median(turn.long.ttft_s for turn in each)
    return found


def child(plan: OvertakingPlan) -> None:
    """Start an engine, do the plan's work and print its readings as the last line."""
    from engines.lmdeploy.launch import prepare

    prepare(serving=False)
    import torch
    from lmdeploy.messages import PytorchEngineConfig
    from lmdeploy.pytorch.engine.engine import Engine

    tokens = plan.long_tokens + plan.context_tokens + plan.new_tokens
    settings: dict[str, Any] = {
        "device_type": "cuda" if torch.cuda.is_available() else "cpu",
        "block_size": plan.block_tokens,
        "num_gpu_blocks": tokens // plan.block_tokens + 64,
        "max_batch_size": 8,
        "enable_prefix_caching": True,
        "max_prefill_token_num": plan.chunk_tokens,
        "session_len": tokens,
    }
    if torch.cuda.is_available():
        settings |= {"dtype": "bfloat16"}
    engine = Engine.from_pretrained(plan.model, engine_config=PytorchEngineConfig(**settings))
    found = asyncio.run(_work(engine, plan))
    sys.stdout.write(f"\n{json.dumps(found)}\n")
    sys.stdout.flush()
    os._exit(0)  # the readings are out; an engine's teardown takes longer than it is worth


if __name__ == "__main__":
    child(OvertakingPlan(**json.loads(sys.argv[1])))
