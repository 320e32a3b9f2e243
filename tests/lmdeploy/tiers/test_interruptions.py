"""An engine that is interrupted under load: no request gets another's tokens, and no block is wrong afterwards."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcontrol.core.blocks import CacheTier
from tests.support.disturbed_engine import DisturbedEngine, Ended
from tests.support.tiered_engine import PROMPTS, TieredEngine
from tests.support.weights import read_weights, update_request

pytestmark = pytest.mark.engine

NEW_TOKENS = 40
VICTIM_TOKENS = 8
AT_ONCE = 3


@pytest.fixture(scope="module")
def answers(tiny_llama: Path) -> list[list[int]]:
    """What an engine answers that nothing disturbs and that has no hooks of ours."""
    with TieredEngine.start(tiny_llama, num_gpu_blocks=256) as plain:
        return [plain.run(prompt, new_tokens=NEW_TOKENS)[0] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def _hooked(answers: list[list[int]], _hooks: None) -> None:
    """The answers first."""


@pytest.fixture(params=[0, 64 << 20], ids=["without tiers", "with tiers"])
def disturbed(
    request: pytest.FixtureRequest, tiny_llama: Path, _hooked: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DisturbedEngine]:
    """A pool of 40 blocks, where two contexts fit and three don't, each computed in several chunks."""
    monkeypatch.setenv("KVGATE_ENGINE_DDR_BYTES", str(request.param))
    monkeypatch.setattr("kvcontrol.agent.PROBE_EVERY_S", 0.0)
    with DisturbedEngine.start(tiny_llama, num_gpu_blocks=40, max_prefill_token_num=128, max_batch_size=8) as engine:
        yield engine


def operations(engine: DisturbedEngine, weights: Any) -> dict[str, Callable[[], Awaitable[Any]]]:
    """What may come between an engine's steps, and leaves it with the weights that it has."""

    async def sleep_twice() -> None:
        await asyncio.gather(engine.local.engine.sleep(1), engine.local.engine.sleep(1))
        engine.local.engine.wakeup()

    async def sleep_over_and_over() -> None:
        for _ in range(3):
            await engine.sleep_and_wake()

    async def sleep_after_cancelling() -> None:
        await engine.cancel_all()
        await engine.sleep_and_wake()

    return {
        "sleep": engine.sleep_and_wake,
        "sleep twice": sleep_twice,
        "sleep over and over": sleep_over_and_over,
        "cancel all": engine.cancel_all,
        "sleep after cancelling": sleep_after_cancelling,
        "the same weights": lambda: engine.update(update_request(weights)),
    }


async def disturb(engine: DisturbedEngine, answers: list[list[int]], weights: Any, *, cycles: int, seed: int) -> None:
    """Interrupt requests at any of their tokens, and look at what they, and the first one afterwards, got."""
    choose = random.Random(seed)  # noqa: S311 - places, not secrets
    named = operations(engine, weights)
    for cycle in range(cycles):
        name = [*named][cycle % len(named)]
        places = choose.sample(range(len(PROMPTS)), AT_ONCE + 1)
        after = choose.randrange(AT_ONCE * NEW_TOKENS // 2)
        victim = places.pop()
        tasks = await engine.beside([(PROMPTS[place], NEW_TOKENS) for place in places], named[name], after=after)
        got = await engine.follow(PROMPTS[victim], new_tokens=VICTIM_TOKENS, salt="tenant-b")
        assert got == Ended("FINISH", answers[victim][:VICTIM_TOKENS]), (cycle, name)
        for place, task in zip(places, tasks, strict=True):
            ended = await task
            whole = ended.how == "FINISH"
            assert ended.how in {"FINISH", "CANCEL"}, (cycle, name, ended.how)
            assert whole or name != "the same weights", (cycle, name)
            assert ended.tokens == (answers[place] if whole else answers[place][: len(ended.tokens)]), (cycle, name)
        assert await engine.is_alive()


def restored(engine: DisturbedEngine, answers: list[list[int]]) -> None:
    """What the tiers hold gives the same tokens; some of it is there."""
    engine.check()
    before = engine.offload.loads
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        engine.evict_hbm()
        assert engine.run(prompt, new_tokens=NEW_TOKENS, salt="tenant-a") == [answer]
    engine.rest()
    engine.evict_hbm()
    assert engine.run(PROMPTS[0], new_tokens=NEW_TOKENS, salt="tenant-a") == [answers[0]]
    assert engine.offload.loads > before
    assert CacheTier.DDR in engine.resident()


@pytest.mark.parametrize("cycles", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_whatever_interrupts_an_engine_every_answer_is_the_one_of_an_engine_left_alone(
    disturbed: DisturbedEngine, tiny_llama: Path, answers: list[list[int]], cycles: int
) -> None:
    weights = read_weights(tiny_llama)
    # a bound of time for each part, and not for all of them together
    for part in range(cycles // 12):
        disturbed.do(lambda: disturb(disturbed, answers, weights, cycles=12, seed=part))  # noqa: B023 - run at once
    if disturbed.agent.tiers is not None:
        restored(disturbed, answers)
