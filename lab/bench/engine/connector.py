"""What the connector costs the engine's loop: ``python -m lab.bench.engine.connector [options]``.

Every microsecond that it takes is one in which the engine's thread starts no kernel. The real connector, planner, tiers
and hierarchy run here over a small pool of CPU memory; the engine's side is a script that calls what LMDeploy calls, in
its order, and nothing else takes time. The transfers' threads are replaced by calls in between, timed apart: what they
run in Python competes for the same interpreter.

    cold        nothing is anywhere: all blocks are computed and saved
    revisit     nothing is in the engine's own cache: all blocks but the last are loaded
    hbm_hit     all blocks but the last are in the engine's own cache

Printed as one JSON object: microseconds of CPU time a block of the context, the least of the rounds, for each call and
in all; ``*_request_us`` is what a request costs whatever its length (from a context of two blocks). A
prompt's tokens are hashed once per request; that share is printed too (``hash``).
"""

import argparse
import gc
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import numpy as np

from engines.events.log import EventLog
from engines.lmdeploy.offload.memory import EngineMemory
from engines.lmdeploy.offload.tiers import Built, EngineTiers
from kvcontrol.core.blocks import CacheIdentity
from kvcontrol.core.hashing import chain_hashes, root_hash
from kvcontrol.kv_policy import LruPolicy, PrefillSpeed
from kvcontrol.kv_runtime import HierarchyConfig, HierarchyManager, HostArena, QuotaManager
from kvcontrol.kv_runtime.crew import SteppedCrew

PHASES: Final = ("cold", "revisit", "hbm_hit")
_BLOCK_TOKENS: Final = 64
_PIECE_BYTES: Final = 64
_LAYERS: Final = 2
_SHORTEST: Final = 2
"""A context of one block, and a block that is new."""
_IDLE_STEPS: Final = 10
"""Steps without a forward in which LMDeploy asks for what ended while a load is under way."""


@dataclass(slots=True)
class Sequence_:  # noqa: N801 - what LMDeploy calls SchedulerSequence, as far as the connector reads it
    """A request of the script."""

    seq_id: int
    history_cache: Any
    num_history_ids: int
    adapter_name: str | None = None
    sampling_param: Any = None
    history_embeddings: Sequence[Any] = ()

    @property
    def history_multimodals(self) -> "Sequence_":
        return self

    def empty(self) -> bool:
        return True

    def get_prefix_cache_max_candidate_step(self) -> int:
        return len(self.history_cache) - 1

    def clamp_prefix_cache_match_step(self, step: int) -> int:
        return step


class _Times:
    """CPU seconds of each named call of one visit: a busy machine does not change them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.thread_time()
        try:
            yield
        finally:
            self.seconds[name] += time.thread_time() - started


@dataclass(slots=True)
class Bench:
    """One connector over ``blocks`` blocks a context; ``visit`` is one request from its arrival to its end."""

    blocks: int
    contexts: int
    _crew: SteppedCrew = field(init=False)
    _tiers: EngineTiers = field(init=False)
    _worker: Any = field(init=False)
    _scheduler: Any = field(init=False)
    _next_id: int = 0

    def __post_init__(self) -> None:
        import torch
        from lmdeploy.pytorch.kv_connector.base import KVConnectorRole

        from engines.lmdeploy.offload.connector import OffloadConnector

        slots = self.blocks + 1
        pool = torch.zeros((_LAYERS, slots, _PIECE_BYTES), dtype=torch.uint8)
        self._crew = SteppedCrew()
        self._tiers = EngineTiers(pages_per_block=1, deadline_s=60.0)
        self._worker = OffloadConnector(KVConnectorRole.WORKER, self._tiers)
        self._scheduler = OffloadConnector(KVConnectorRole.SCHEDULER, self._tiers)
        self._worker.register_kv_caches({f"layer_{layer}": pool[layer] for layer in range(_LAYERS)})
        identity = CacheIdentity(
            model="bench", revision="0", kv_dtype="uint8", block_size_tokens=_BLOCK_TOKENS, tp_rank=0, tp_size=1
        )
        log = EventLog(block_size_tokens=_BLOCK_TOKENS, clock=time.time, on_pending=lambda: None)
        self._tiers.start(self._build, identity, log, _Leases())

    def visit(self, tokens: Any, *, cached_blocks: int, times: _Times) -> int:
        """Serve one request; returns how many blocks were loaded."""
        seq = Sequence_(self._next_id, tokens, 0)
        self._next_id += 1
        scheduler = self._scheduler
        blocks = len(tokens) // _BLOCK_TOKENS
        slots = tuple(range(blocks))
        self._tiers.agent.costs.prefill = PrefillSpeed()  # type: ignore[union-attr]  # nothing is computed here: no race
        scheduler.on_new_request(seq)
        with times("look_up"):
            found, _ = scheduler.get_num_new_matched_tokens(seq, cached_blocks * _BLOCK_TOKENS)
        loaded = int(found) // _BLOCK_TOKENS
        if loaded:
            with times("allocated"):
                scheduler.update_state_after_alloc(seq, slots[cached_blocks : cached_blocks + loaded], found)
            ended = False
            for _ in range(_IDLE_STEPS):
                ended = self._step(None, (), times) or ended
                self._carry(times)
            while not ended:
                ended = self._step(None, (), times)
                self._carry(times)
        seq.num_history_ids = (cached_blocks + loaded) * _BLOCK_TOKENS
        self._step(seq, slots, times)
        self._carry(times)
        seq.num_history_ids = len(tokens)
        for _ in range(2):
            self._step(None, (), times)
        with times("request_finished"):
            self._tiers.planner.ended(seq, slots, slots)  # type: ignore[union-attr]
        self._step(None, (), times)
        return loaded

    def _step(self, seq: Any, slots: Sequence[int], times: _Times) -> bool:
        """One turn of LMDeploy's loop, with the prefill of a request or none; True once a load has ended."""
        from lmdeploy.pytorch.kv_connector.base import KVConnectorStepInput

        step = KVConnectorStepInput()
        if seq is not None:
            step = KVConnectorStepInput(
                running=[seq],
                connector_token_lens=(len(seq.history_cache),),
                connector_block_ids=(tuple(slots),),
                connector_logical_block_ids=(tuple(slots),),
            )
        worker, scheduler = self._worker, self._scheduler
        with times("build_connector_meta"):
            metadata = scheduler.build_connector_meta(step)
        if metadata is None:
            return False
        worker.bind_connector_metadata(metadata)
        with times("start_load_kv"):
            worker.start_load_kv()
        if seq is not None:
            with times("start_save_kv"):
                worker.start_save_kv()
        worker._had_forward = True  # noqa: SLF001 - a step without a forward would sleep a moment
        with times("get_finished"):
            output = worker.get_finished()
        worker.clear_connector_metadata()
        with times("update_connector_output"):
            result = scheduler.update_connector_output(output)
        failed = [each for each in result.load_results if not each.success]
        if failed:
            raise RuntimeError(f"{len(failed)} loads failed; nothing here may fail")
        return bool(result.load_results)

    def _carry(self, times: _Times) -> None:
        with times("transfers"):
            self._crew.run()

    def _build(self, memory: EngineMemory, identity: CacheIdentity) -> Built:  # noqa: ARG002
        arena = HostArena(slots=(self.blocks + 1) * self.contexts, block_bytes=memory.block_bytes)
        hierarchy = HierarchyManager(
            HierarchyConfig(),
            engine=memory,
            arena=arena,
            durable=None,
            make_policy=LruPolicy,
            quotas=QuotaManager(),
            crew=self._crew,
        )
        return Built(hierarchy, arena, arena.close)

    def close(self) -> None:
        self._tiers.close()


class _NoTrie:
    """A prefix cache that is switched off, and that nobody watches."""

    enabled = False
    allocator = None


class _Leases:
    """What LMDeploy's scheduler offers for saves of ended requests; without a prefix cache."""

    block_trie = _NoTrie()

    @property
    def kv_save_coordinator(self) -> "_Leases":
        return self

    def acquire(self, metadata: Any) -> None:
        """Blocks of the script are never reused."""


def measure(*, blocks: int, rounds: int, seed: int = 1) -> dict[str, float]:
    """Return the metrics by name."""
    random = Random(seed)  # noqa: S311 - no secret
    bench = Bench(blocks=blocks, contexts=2 * rounds + 1)
    taken: dict[str, list[_Times]] = {phase: [] for phase in PHASES}

    def fresh(count: int) -> Any:
        return np.frombuffer(random.randbytes(4 * _BLOCK_TOKENS * count), dtype="<u4").copy()

    try:
        for _ in range(rounds):
            context = fresh(blocks - 1)
            for phase in PHASES:
                prompt = np.concatenate([context, fresh(1)])
                times = _Times()
                gc.collect()
                gc.freeze()  # what is older costs a collection as much as the rest of the process is large
                loaded = bench.visit(prompt, cached_blocks=blocks - 1 if phase == "hbm_hit" else 0, times=times)
                if loaded != (blocks - 1 if phase == "revisit" else 0):
                    raise RuntimeError(f"{phase}: {loaded} of {blocks} blocks were loaded")
                taken[phase].append(times)
    finally:
        gc.unfreeze()
        bench.close()
    metrics: dict[str, float] = {}
    for phase, visits in taken.items():
        names = sorted({name for times in visits for name in times.seconds})
        for name in names:
            metrics[f"{phase}_{name}_us"] = _least(lambda t, n=name: t.seconds[n], visits, blocks)  # type: ignore[misc]
        metrics[f"{phase}_us"] = _least(
            lambda t: sum(took for name, took in t.seconds.items() if name != "transfers"), visits, blocks
        )
    metrics["hash_us"] = _hash_us(blocks)
    return metrics


def _least(of: Callable[[_Times], float], visits: Sequence[_Times], blocks: int) -> float:
    return round(min(of(times) for times in visits) / blocks * 1e6, 3)


def _hash_us(blocks: int) -> float:
    packed = Random(0).randbytes(4 * _BLOCK_TOKENS * blocks)  # noqa: S311 - no secret
    root = root_hash(CacheIdentity(model="m", revision="0", kv_dtype="u8", block_size_tokens=64, tp_rank=0, tp_size=1))
    started = time.thread_time()
    chain_hashes(root, packed, _BLOCK_TOKENS)
    return round((time.thread_time() - started) / blocks * 1e6, 3)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure what the KV connector costs the engine's loop, per block.")
    parser.add_argument("--blocks", type=int, default=512, help="blocks of 64 tokens in a context")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(argv)
    if options.blocks < _SHORTEST or options.rounds < 1:
        parser.error("--blocks must be at least 2, --rounds at least 1")
    metrics = measure(blocks=options.blocks, rounds=options.rounds)
    shortest = measure(blocks=_SHORTEST, rounds=options.rounds)
    metrics |= {f"{phase}_request_us": round(_SHORTEST * shortest[f"{phase}_us"], 1) for phase in PHASES}
    json.dump({"blocks": options.blocks, "cpus": os.cpu_count(), "metrics": metrics}, sys.stdout, indent=2)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
