"""What it costs to build a graph and run all passes over it, by the number of its requests."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.roles import KVTransport
from kvcontrol.scheduler_ir import (
    CachedRun,
    Device,
    DeviceLimits,
    Handover,
    IRBuilder,
    IROptimizer,
    IRRequest,
    PassContext,
    Placement,
    SharedPrefix,
)
from lab.research.ir.passes import all_passes

_LIMITS = DeviceLimits(
    capacity_tokens=200_000, prefill_batch_tokens=8192, decode_batch_requests=64, spill=CacheTier.DDR
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildTimes:
    """Graphs of so many requests: nodes after all passes, and the processor time of building and optimising."""

    requests: int
    nodes: int
    build_p50_us: float
    optimize_p50_us: float


def measure(*, requests: int, repeats: int, seed: int = 0) -> BuildTimes:
    """Time ``repeats`` graphs, of other requests each: half of them separated, many with a prefix that others have."""
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    builder, build_s, optimize_s, nodes = IRBuilder(), [], [], 0
    for _ in range(repeats):
        asked = _asked(rng, requests)
        context = PassContext(
            requests={each.request_id: each for each in asked},
            devices={each: _LIMITS for one in asked for each in (one.placement.answer, one.placement.prefill)},
        )
        begin_s = time.thread_time()
        graph = builder.build(asked)
        built_s = time.thread_time()
        graph = graph.optimize(IROptimizer(all_passes(), context))
        optimize_s.append(time.thread_time() - built_s)
        build_s.append(built_s - begin_s)
        nodes = max(nodes, len(graph))
    return BuildTimes(
        requests=requests, nodes=nodes, build_p50_us=_median_us(build_s), optimize_p50_us=_median_us(optimize_s)
    )


def _asked(rng: random.Random, count: int) -> list[IRRequest]:
    return [_request(rng, number) for number in range(count)]


def _request(rng: random.Random, number: int) -> IRRequest:
    answer = Device(f"d{rng.randrange(4)}")
    separated = rng.random() < 1 / 2
    handover = Handover(prefill=Device(f"p{rng.randrange(2)}"), transport=KVTransport.MIGRATION) if separated else None
    tokens = 1024 + int(2_000 * rng.lognormvariate(0, 1.0))
    held = rng.randrange(0, min(tokens, 512))
    return IRRequest(
        request_id=f"r{number}",
        prompt_tokens=min(tokens, 32_768),
        max_tokens=256,
        placement=Placement(answer=answer, handover=handover),
        priority=rng.choice((-1, 0, 1)),
        cached=(CachedRun(device=answer, tier=CacheTier.HBM, end=held),) if held else (),
        shared=(SharedPrefix(key=f"system-{rng.randrange(4)}".encode(), end=768),),
        reuse_s=rng.choice((None, 60.0, 3600.0)),
    )


def _median_us(took_s: Sequence[float]) -> float:
    return sorted(took_s)[len(took_s) // 2] * 1e6
