"""A request that is given up, wherever it was, leaves no block, lease, hold or plan behind."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.tiered_engine import NEW_TOKENS, PROMPTS, TieredEngine, visit

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("phase", ["waiting", "loading", "saving", "decoding", "tail"])
def test_a_cancel_leaves_nothing_behind(
    tiered: TieredEngine, expected: list[list[int]], faults: Callable[..., None], phase: str
) -> None:
    visit(tiered, expected, rounds=1)
    tiered.rest()
    tiered.evict_hbm()
    planner, scheduler = tiered.tiers.planner, tiered.scheduler
    assert planner is not None
    if phase == "loading":
        faults(engine_write={"delay_s": 0.5})
    if phase in {"saving", "tail"}:
        tiered.forget_all()
        faults(engine_read={"delay_s": 0.5})

    def decodes(session: int) -> bool:
        sequences = scheduler.sessions[session].sequences if session in scheduler.sessions else {}
        return any(seq.num_new_tokens > 3 for seq in sequences.values())

    is_there: Callable[[int], bool] = {
        "waiting": lambda session: session in scheduler.sessions,
        "loading": lambda _: bool(scheduler.kv_load_coordinator._loads),
        "saving": lambda _: bool(scheduler.kv_save_coordinator._leases),
        "tail": lambda _: bool(scheduler.kv_save_coordinator._leases),
        "decoding": decodes,
    }[phase]
    reached: list[int] = []

    async def until(session: int) -> None:
        while not is_there(session):
            await asyncio.sleep(0.001)
        reached.append(session)

    async def work() -> list[list[int]]:
        new_tokens = 2 if phase == "tail" else 200
        return list(
            await asyncio.gather(
                *(tiered.ask(prompt, new_tokens=new_tokens, cancel=until) for prompt in PROMPTS[:3]),
            )
        )

    answers = tiered.do(work)
    assert reached
    for answer, tokens in zip(answers, expected, strict=False):
        assert answer[:NEW_TOKENS] == tokens[: len(answer)]
    tiered.check()
    faults()
    visit(tiered, expected, rounds=1)


def test_random_cancels_leave_nothing_behind(
    tiered: TieredEngine, expected: list[list[int]], faults: Callable[..., None]
) -> None:
    faults(engine_write={"fail": 0.1, "delay_s": 0.005}, engine_read={"fail": 0.1, "delay_s": 0.005})
    chooser = random.Random(11)  # noqa: S311 - delays

    def after(delay_s: float) -> Callable[[int], Any]:
        return lambda _: asyncio.sleep(delay_s)

    async def storm() -> list[tuple[int, list[int]]]:
        places = [chooser.randrange(len(PROMPTS)) for _ in range(60)]
        answers = await asyncio.gather(
            *(tiered.ask(PROMPTS[place], new_tokens=NEW_TOKENS, cancel=after(chooser.random() * 3)) for place in places)
        )
        return list(zip(places, answers, strict=True))

    for place, answer in tiered.do(storm):
        assert answer == expected[place][: len(answer)]
    tiered.check()
    faults()
    visit(tiered, expected, rounds=1)
