"""Prompts whose KV comes back from the tiers, in chunks beside running answers: the same tokens under every pace."""

import asyncio

import pytest

from engines.lmdeploy.schedule.overlap import provide
from engines.lmdeploy.schedule.pacing import Pacer, pacer_of
from engines.lmdeploy.schedule.step_watch import timeline_of
from kvcontrol.core.steps import StepsQuery
from kvcontrol.scheduler_ir.pacing import ChunkBounds, make_pace
from tests.support.models import random_prompt
from tests.support.tiered_engine import NEW_TOKENS, PROMPTS, TieredEngine

pytestmark = pytest.mark.engine

PACES = {"lmdeploy": {}, "alternate": {}, "itl_target": {"itl_target_ms": 1.0, "prefill_share": 0.5}}
OVERLAPS = "itl_target with chunks that overlap"
"""On the second stream that only GPUs get by themselves."""


def pacer(tiered: TieredEngine) -> Pacer:
    found = pacer_of(tiered.scheduler)
    assert found is not None
    return found


@pytest.mark.parametrize("name", [*PACES, OVERLAPS])
def test_restores_beside_a_running_answer_give_the_same_tokens(
    tiered: TieredEngine, expected: list[list[int]], name: str
) -> None:
    name, overlaps = name.split(maxsplit=1)[0], name == OVERLAPS
    pacer(tiered).swap(make_pace(name, PACES[name]))
    bounds = pacer(tiered)._bounds
    if overlaps:
        pacer(tiered).overlap = provide(pacer(tiered)._maker)
        pacer(tiered)._bounds = ChunkBounds(block_tokens=16, most_tokens=64)  # every prompt has several chunks
    try:
        for _ in range(2):  # computed, then loaded: the pool holds one prompt of six

            async def beside() -> list[list[int]]:
                answer = asyncio.ensure_future(tiered.ask(random_prompt(9, 500), new_tokens=120))
                answers = [await tiered.ask(prompt, new_tokens=NEW_TOKENS) for prompt in PROMPTS]
                await answer
                return answers

            assert tiered.do(beside) == expected
            tiered.rest()
        assert tiered.offload.loads > 0
        assert (pacer(tiered).errors, pacer(tiered).failed) == (0, False)
        timeline = timeline_of(tiered.scheduler)
        assert timeline is not None
        reasons = {step.reason for step in timeline.report(StepsQuery(last=200)).steps}
        assert ("lmdeploy" in reasons) == (name == "lmdeploy")
        if (overlap := pacer(tiered).overlap) is not None:
            assert overlap.count
    finally:
        pacer(tiered).overlap, pacer(tiered)._bounds = None, bounds
        pacer(tiered).swap(make_pace("alternate"))
