"""Weights that change under requests: what goes on is computed with the new ones, and nothing of the old is left."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.control.calls import EngineBusyError
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockHash
from tests.support.disturbed_engine import DisturbedEngine, Ended
from tests.support.tiered_engine import PROMPTS, TieredEngine
from tests.support.trainer import Trainer, training
from tests.support.weights import broken_after, read_weights, update_request

pytestmark = pytest.mark.engine

NEW_TOKENS = 40
PROMPT = PROMPTS[0]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same shape."""
    from engines.models.tiny import build_tiny

    return build_tiny(tmp_path_factory.mktemp("models") / "other", seed=1)


@pytest.fixture(scope="module")
def references(tiny_llama: Path, other: Path) -> Iterator[tuple[TieredEngine, TieredEngine]]:
    """Engines that nothing disturbs and that have no hooks of ours, one with each model's weights."""
    with (
        TieredEngine.start(tiny_llama, num_gpu_blocks=256) as old,
        TieredEngine.start(other, num_gpu_blocks=256) as new,
    ):
        yield old, new


@pytest.fixture(scope="module")
def answers(references: tuple[TieredEngine, TieredEngine]) -> tuple[list[int], list[int]]:
    """What each answers to the prompt."""
    old, new = (engine.run(PROMPT, new_tokens=NEW_TOKENS)[0] for engine in references)
    assert old != new
    return old, new


@pytest.fixture(scope="module")
def _hooked(answers: object, _hooks: None) -> None:
    """The answers first."""


@pytest.fixture
def engine(tiny_llama: Path, _hooked: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[DisturbedEngine]:
    monkeypatch.setenv("KVGATE_ENGINE_DDR_BYTES", str(64 << 20))
    monkeypatch.setattr("kvcontrol.agent.PROBE_EVERY_S", 0.0)
    with DisturbedEngine.start(tiny_llama, num_gpu_blocks=128) as engine:
        yield engine
        assert engine.do(engine.is_alive)
        engine.check()


def names(engine: DisturbedEngine) -> set[BlockHash]:
    """All blocks that are announced to be anywhere."""
    return set().union(*engine.resident().values())


def revision(engine: DisturbedEngine) -> str:
    return engine.agent.tracker.identity.revision


async def beside_a_request(
    engine: DisturbedEngine, operation: Callable[[], Awaitable[Any]]
) -> tuple[int, "asyncio.Task[Ended]"]:
    """Run an operation within a request's answer; return how many of its tokens came before, and the request."""
    before = 0

    async def and_count() -> None:
        nonlocal before
        try:
            await operation()
        finally:
            [seq] = engine.scheduler.seq_manager.get_all_sequences()
            before = len(seq.generated_ids)

    [task] = await engine.beside([(PROMPT, NEW_TOKENS)], and_count, after=5)
    return before, task


def test_a_running_request_goes_on_as_the_new_weights_would_after_its_tokens_so_far(
    engine: DisturbedEngine, other: Path, references: tuple[TieredEngine, TieredEngine], answers: tuple[list[int], ...]
) -> None:
    async def update() -> tuple[int, Ended]:
        request = update_request(read_weights(other))
        before, task = await beside_a_request(engine, lambda: engine.update(request))
        return before, await task

    before, ended = engine.do(update)
    assert 5 <= before < NEW_TOKENS
    assert ended.how == "FINISH"
    assert ended.tokens[:before] == answers[0][:before]
    [rest] = references[1].run([*PROMPT, *ended.tokens[:before]], new_tokens=NEW_TOKENS - before)
    assert ended.tokens[before:] == rest


def test_no_block_that_was_made_before_is_found_saved_or_announced_afterwards(
    engine: DisturbedEngine, other: Path, answers: tuple[list[int], ...], faults: Callable[..., None]
) -> None:
    assert engine.run(PROMPT, new_tokens=NEW_TOKENS, salt="tenant-a") == [answers[0]]
    engine.rest()
    old, hits = names(engine), engine.local.hit_tokens
    faults(engine_read={"delay_s": 0.2})  # saves are under way when the weights change

    async def update() -> Ended:
        request = update_request(read_weights(other))
        _, task = await beside_a_request(engine, lambda: engine.update(request))
        hits_of_the_first_time = engine.local.hit_tokens
        assert not names(engine) & old
        ended = await task
        assert engine.local.hit_tokens == hits_of_the_first_time
        return ended

    engine.do(update)
    hits = engine.local.hit_tokens
    faults()
    loads = engine.offload.loads
    assert engine.run(PROMPT, new_tokens=NEW_TOKENS, salt="tenant-b") == [answers[1]]
    assert engine.local.hit_tokens == hits
    assert engine.offload.loads == loads
    engine.rest()
    assert not names(engine) & old
    engine.evict_hbm()
    assert engine.run(PROMPT, new_tokens=NEW_TOKENS, salt="tenant-b") == [answers[1]]
    assert engine.offload.loads == loads + 1


def test_weights_of_which_half_arrived_are_other_weights(engine: DisturbedEngine, other: Path) -> None:
    engine.run(PROMPT, new_tokens=NEW_TOKENS)
    engine.rest()
    old, before = revision(engine), names(engine)
    tensors = read_weights(other)
    request = update_request(broken_after(tensors, [*tensors][:3]))

    async def update() -> Ended:
        async def fail() -> None:
            with pytest.raises(Exception, match=r"size|shape"):
                await engine.update(request)

        _, task = await beside_a_request(engine, fail)
        return await task

    assert engine.do(update).how == "FINISH"
    assert revision(engine) != old
    engine.rest()
    assert not names(engine) & before


def test_weights_that_a_trainer_broadcasts_are_other_weights(
    engine: DisturbedEngine, other: Path, references: tuple[TieredEngine, TieredEngine], answers: tuple[list[int], ...]
) -> None:
    engine.run(PROMPT, new_tokens=NEW_TOKENS)
    engine.rest()
    old, earlier = revision(engine), names(engine)

    async def update(trainer: Trainer) -> tuple[int, Ended]:
        lmdeploy = engine.local.engine
        assert (await lmdeploy.init_weights_update_group(trainer.group_request))[0]

        async def receive() -> None:
            done, why = await lmdeploy.update_weights_from_distributed(trainer.weights_request)
            assert done, why

        before, task = await beside_a_request(engine, receive)
        ended = await task
        assert (await lmdeploy.destroy_weights_update_group(trainer.group_request))[0]
        return before, ended

    with training(other) as trainer:
        before, ended = engine.do(lambda: update(trainer))
    assert ended.tokens[:before] == answers[0][:before]
    [rest] = references[1].run([*PROMPT, *ended.tokens[:before]], new_tokens=NEW_TOKENS - before)
    assert ended.tokens[before:] == rest
    assert revision(engine) != old
    engine.rest()
    assert not names(engine) & earlier


@pytest.mark.parametrize("way", ["update_weights_from_distributed", "update_weights_from_ipc"])
def test_an_update_that_fails_at_once_leaves_no_block_either(
    engine: DisturbedEngine, tiny_llama: Path, answers: tuple[list[int], ...], way: str
) -> None:
    from lmdeploy.serve.openai.protocol import UpdateWeightsFromIPCRequest

    engine.run(PROMPT, new_tokens=NEW_TOKENS)
    engine.rest()
    old, earlier = revision(engine), names(engine)
    requests = {
        "update_weights_from_distributed": Trainer(port=1, folder=tiny_llama).weights_request,  # nobody has begun it
        "update_weights_from_ipc": UpdateWeightsFromIPCRequest(zmq_handles={}),  # there is no device for it
    }

    async def update() -> Ended:
        async def fail() -> None:
            assert not (await getattr(engine.local.engine, way)(requests[way]))[0]

        _, task = await beside_a_request(engine, fail)
        return await task

    assert engine.do(update) == Ended("FINISH", answers[0])
    assert revision(engine) != old
    engine.rest()
    assert not names(engine) & earlier


def test_equal_instances_whose_weights_changed_have_no_name_in_common(
    engine: DisturbedEngine, tiny_llama: Path, other: Path
) -> None:
    with DisturbedEngine.start(tiny_llama, num_gpu_blocks=128) as second:
        assert revision(engine) == revision(second)
        engine.do(lambda: engine.update(update_request(read_weights(other))))
        second.do(lambda: second.update(update_request(read_weights(tiny_llama))))
        assert revision(engine) != revision(second)
        for each in (engine, second):
            each.run(PROMPT)
            each.rest()
        assert names(engine)
        assert not names(engine) & names(second)


def test_weights_that_sleep_dropped_are_other_weights_even_before_they_are_loaded_again(
    engine: DisturbedEngine, tiny_llama: Path, answers: tuple[list[int], ...]
) -> None:
    engine.run(PROMPT, new_tokens=NEW_TOKENS)
    engine.rest()
    before, seen = names(engine), {revision(engine)}

    async def sleep() -> None:
        await engine.local.engine.sleep(2)
        seen.add(revision(engine))
        assert names(engine) == set()
        engine.local.engine.wakeup(["weights"])
        await engine.update(update_request(read_weights(tiny_llama)))
        seen.add(revision(engine))
        engine.local.engine.wakeup(["kv_cache"])

    engine.do(sleep)
    assert len(seen) == 3
    assert engine.run(PROMPT, new_tokens=NEW_TOKENS) == [answers[0]]
    assert engine.offload.loads == 0
    engine.rest()
    assert names(engine)
    assert not names(engine) & before


def test_what_was_pinned_is_pinned_no_more(engine: DisturbedEngine, tiny_llama: Path) -> None:
    engine.run(PROMPT)
    engine.rest()

    async def pin_and_change() -> None:
        below = engine.resident()[CacheTier.DDR]
        path = [block.key for _, block in engine.hierarchy.blocks() if block.key in below]
        engine.agent.pins.pin(path[:4], None)
        assert engine.agent.pins.report().pins
        await engine.update(update_request(read_weights(tiny_llama)))
        assert not engine.agent.pins.report().pins
        engine.agent.pins.check_integrity()

    engine.do(pin_and_change)
    assert set(engine.agent.pins.counts().values()) == {0}


def test_weights_are_not_loaded_beside_steps(
    engine: DisturbedEngine, other: Path, answers: tuple[list[int], ...]
) -> None:
    request, old = update_request(read_weights(other)), revision(engine)

    async def at_once() -> None:
        with pytest.raises(EngineBusyError, match="during the engine's steps"):
            engine.local.engine.update_params(request)

    async def update() -> Ended:
        _, task = await beside_a_request(engine, at_once)
        return await task

    assert engine.do(update) == Ended("FINISH", answers[0])
    assert revision(engine) == old


def test_an_engine_that_is_awake_keeps_its_pool_and_one_that_falls_asleep_is_not_woken(
    engine: DisturbedEngine, answers: tuple[list[int], ...]
) -> None:
    lmdeploy = engine.local.engine
    pool = lmdeploy.executor.model_agent.cache_engine

    async def wake_too_early() -> None:
        lmdeploy.wakeup(["kv_cache"])
        assert lmdeploy.executor.model_agent.cache_engine is pool
        sleeping = asyncio.create_task(lmdeploy.sleep(1))
        await asyncio.sleep(0)  # it has begun
        with pytest.raises(EngineBusyError, match="ask again"):
            lmdeploy.wakeup()
        await sleeping
        lmdeploy.wakeup()

    async def sleep() -> Ended:
        [task] = await engine.beside([(PROMPT, NEW_TOKENS)], wake_too_early, after=5)
        return await task

    ended = engine.do(sleep)
    assert ended.how == "CANCEL"
    assert ended.tokens == answers[0][: len(ended.tokens)]
    assert engine.run(PROMPT, new_tokens=NEW_TOKENS) == [answers[0]]
