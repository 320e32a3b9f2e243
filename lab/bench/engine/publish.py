"""What hanging a loaded prompt into the block trie costs: ``python -m lab.bench.engine.publish [options]``.

A prompt whose blocks have come from a tier waits for this before its forward can be prepared. LMDeploy's own paging
objects are used, without an engine around them:

    lmdeploy    as LMDeploy does it, nothing replaced
    ours        with kvgate's keys, tenants, events and eviction: more is done, and LMDeploy's part is quicker
    ahead       the same, of a path that was made while the blocks were loading; ``ahead_making`` is that other part

Printed as one JSON object: microseconds of CPU time a block, the least of the rounds, which alternate.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from engines.control.guard import Guard
from engines.events.log import EventLog
from engines.lmdeploy.patching import install
from engines.lmdeploy.trie.events import TrieTracker
from engines.lmdeploy.trie.path import PathMaker
from engines.lmdeploy.trie.tenancy import CARRIED_SALT
from kvcontrol.core.blocks import CacheIdentity

WAYS: Final = ("lmdeploy", "ours", "ahead")
_BLOCK_TOKENS: Final = 64
_VOCABULARY: Final = 32_000


def measure(blocks: int, rounds: int) -> dict[str, float]:
    """Return microseconds a block, by way; ``blocks`` and ``rounds`` > 0."""
    least: dict[str, float] = {}
    random = np.random.default_rng(1)
    for _ in range(rounds):
        for way in WAYS:
            prompt = random.integers(0, _VOCABULARY, size=blocks * _BLOCK_TOKENS + 1)
            for name, seconds in _times(way, prompt, blocks).items():
                least[name] = min(least.get(name, seconds), seconds)
    return {f"{name}_us": seconds / blocks * 1e6 for name, seconds in least.items()}


def _times(way: str, prompt: "np.ndarray[Any, np.dtype[np.int64]]", blocks: int) -> dict[str, float]:
    from engines.lmdeploy.hooks import event_hooks, eviction_hooks, key_hooks, tenant_hooks, tier_hooks

    hooks = [] if way == "lmdeploy" else [*event_hooks(), *eviction_hooks(), *key_hooks(), *tenant_hooks()]
    undo = install([*hooks, *tier_hooks()] if way == "ahead" else hooks)
    try:
        scheduler = _scheduler(blocks + 2)
        trie = scheduler.block_trie
        if hooks:
            identity = CacheIdentity(model="m", revision="1", kv_dtype="bfloat16", block_size_tokens=_BLOCK_TOKENS)
            log = EventLog(block_size_tokens=_BLOCK_TOKENS, clock=time.time, on_pending=lambda: None)
            TrieTracker(log, identity).watch(trie)
        seq = _sequence(scheduler, prompt, salt="0123456789abcdef" if hooks else "")
        scheduler.block_manager.allocate(seq)
        times: dict[str, float] = {}
        gc.collect()
        gc.disable()
        if way == "ahead":
            began_s = time.thread_time()
            maker = PathMaker(Guard(), grace_s=0.0)
            maker.begin(trie, seq, blocks)
            while maker.work():
                pass
            times["ahead_making"] = time.thread_time() - began_s
        began_s = time.thread_time()
        trie.allocate(seq)
        times[way] = time.thread_time() - began_s
        return times
    finally:
        gc.enable()
        undo()


def _scheduler(blocks: int) -> Any:
    from lmdeploy.pytorch.config import CacheConfig, SchedulerConfig
    from lmdeploy.pytorch.messages import SequenceMeta
    from lmdeploy.pytorch.paging.scheduler import Scheduler
    from lmdeploy.pytorch.strategies.ar.sequence import ARSequenceStrategy

    cache = CacheConfig(
        max_batches=1,
        block_size=_BLOCK_TOKENS,
        num_cpu_blocks=0,
        num_gpu_blocks=blocks,
        enable_prefix_caching=True,
    )
    limits = SchedulerConfig(max_batches=1, max_session_len=blocks * _BLOCK_TOKENS)
    return Scheduler(limits, cache, SequenceMeta(_BLOCK_TOKENS, strategy=ARSequenceStrategy()))


def _sequence(scheduler: Any, prompt: "np.ndarray[Any, np.dtype[np.int64]]", *, salt: str) -> Any:
    from lmdeploy.messages import GenerationConfig
    from lmdeploy.pytorch.messages import SamplingParam

    asked = GenerationConfig()
    CARRIED_SALT.carry(asked, salt)
    session = scheduler.add_session(0)
    return session.add_sequence(prompt, sampling_param=SamplingParam.from_gen_config(asked))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m lab.bench.engine.publish", description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_600, help="blocks of 64 tokens in the prompt")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    if options.blocks < 1 or options.rounds < 1:
        parser.error(f"--blocks {options.blocks} --rounds {options.rounds}: both must be at least 1")
    metrics = measure(options.blocks, options.rounds)
    printed = {"bench": "publish", "blocks": options.blocks, "load": os.getloadavg()[0], "metrics": metrics}
    sys.stdout.write(json.dumps(printed, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
