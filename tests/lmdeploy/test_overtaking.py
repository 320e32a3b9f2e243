"""Prompts with little left to compute go before the rest of a long one, and every request gets the same tokens."""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engines.lmdeploy.schedule.pacing import Pacer, pacer_of
from engines.lmdeploy.schedule.urgency import CARRIED_URGENCY, Urgency
from kvcontrol.core.priority import Priority
from kvcontrol.scheduler_ir.pacing import make_pace
from tests.support.disturbed_engine import DisturbedEngine, Ended
from tests.support.models import greedy_reference, random_prompt

pytestmark = pytest.mark.engine

CHUNK = 64
NEW_TOKENS = 8
LONG = random_prompt(1500, 1)
MIDDLE = random_prompt(560, 2)
SHORTER = random_prompt(150, 3)
"""Longer than a chunk."""
OVERTAKING = ("alternate", {"overtaken_share": 1.0})
PACES = [
    OVERTAKING,
    ("itl_target", {"itl_target_ms": 1.0, "prefill_share": 0.5}),
    ("alternate", {"overtaken_share": 0.0}),
    ("lmdeploy", {}),
]

Start = Callable[..., DisturbedEngine]


@pytest.fixture(scope="module", autouse=True)
def _hooks(_cpu_engine: None) -> Iterator[None]:
    from engines.lmdeploy.hooks import event_hooks, interruption_hooks, schedule_hooks, step_hooks
    from engines.lmdeploy.patching import install

    undo = install([*event_hooks(), *interruption_hooks(), *schedule_hooks(), *step_hooks()])
    yield
    undo()


@pytest.fixture(scope="module")
def answers(tiny_llama: Path) -> Callable[[Sequence[int]], list[int]]:
    known: dict[tuple[int, ...], list[int]] = {}

    def answer(prompt: Sequence[int]) -> list[int]:
        key = tuple(prompt)
        if key not in known:
            known[key] = greedy_reference(tiny_llama, [list(prompt)], NEW_TOKENS)[0]
        return known[key]

    return answer


def pacer(engine: DisturbedEngine) -> Pacer:
    found = pacer_of(engine.scheduler)
    assert found is not None
    return found


@pytest.fixture
def start(tiny_llama: Path) -> Iterator[Start]:
    started: list[DisturbedEngine] = []

    def one(pace: tuple[str, dict[str, float]] = OVERTAKING, **config: Any) -> DisturbedEngine:
        settings = {
            "max_prefill_token_num": CHUNK,
            "enable_prefix_caching": True,
            "num_gpu_blocks": 160,
            "session_len": 2048,
        } | config
        engine = DisturbedEngine.start(tiny_llama, **settings)
        started.append(engine)
        pacer(engine).swap(make_pace(*pace))
        return engine

    yield one
    for engine in started:
        found = pacer(engine)
        engine.__exit__()
        assert (found.errors, found.failed) == (0, False)


@dataclass(slots=True)
class Line:
    """Prompts that are asked one after the other, each once the one before is computed in chunks."""

    engine: DisturbedEngine
    ended: list[str] = field(default_factory=list)

    @property
    def chunker(self) -> Any:
        return pacer(self.engine)._maker.long_context_chunker

    def ask(self, name: str, prompt: Sequence[int]) -> "asyncio.Task[Ended]":
        async def one() -> Ended:
            result = await self.engine.follow(prompt, new_tokens=NEW_TOKENS)
            self.ended.append(name)
            return result

        return asyncio.create_task(one(), name=name)

    async def ask_in_chunks(self, name: str, prompt: Sequence[int]) -> "asyncio.Task[Ended]":
        """Ask, and wait until the prompt's chunks are computed, its first one being over."""
        session = self.engine._next_session
        task = self.ask(name, prompt)
        await until(lambda: self.is_active(session) and self.chunker.next_step > 0)
        return task

    def is_active(self, session: int) -> bool:
        is_begun = pacer(self.engine).is_possible
        return is_begun and self.chunker.enabled() and self.chunker.seq.session_id == session


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


@pytest.mark.parametrize(("pace", "params"), PACES)
@pytest.mark.parametrize("caching", [True, False])
def test_a_prompt_with_much_less_left_overtakes_under_the_paces_that_let_it(
    start: Start, answers: Callable[..., list[int]], pace: str, params: dict[str, float], *, caching: bool
) -> None:
    engine = start((pace, params), enable_prefix_caching=caching)
    line = Line(engine)

    async def story() -> list[Ended]:
        long = await line.ask_in_chunks("long", LONG)
        return await asyncio.gather(long, line.ask("shorter", SHORTER))

    assert engine.do(story) == [Ended("FINISH", answers(LONG)), Ended("FINISH", answers(SHORTER))]
    overtakes = pace != "lmdeploy" and params.get("overtaken_share") != 0
    assert line.ended == (["shorter", "long"] if overtakes else ["long", "shorter"])
    assert pacer(engine).overtaking.count == overtakes
    assert not pacer(engine).overtaking.has_parked


def test_a_prompt_overtakes_one_that_overtakes_another(start: Start, answers: Callable[..., list[int]]) -> None:
    engine = start()
    line = Line(engine)

    async def story() -> list[Ended]:
        long = await line.ask_in_chunks("long", LONG)
        middle = await line.ask_in_chunks("middle", MIDDLE)
        return await asyncio.gather(long, middle, line.ask("shorter", SHORTER))

    assert [each.tokens for each in engine.do(story)] == [answers(LONG), answers(MIDDLE), answers(SHORTER)]
    assert line.ended == ["shorter", "middle", "long"]
    assert pacer(engine).overtaking.count == 2


def test_a_prompt_counts_by_what_its_prefix_leaves_to_compute(start: Start, answers: Callable[..., list[int]]) -> None:
    engine = start(num_gpu_blocks=300)
    line = Line(engine)
    revisit = [*LONG[:-1], *SHORTER[:70]]
    cold = random_prompt(1400, 4)

    async def story() -> list[Ended]:
        await engine.follow(LONG, new_tokens=1)
        long = await line.ask_in_chunks("cold", cold)
        return await asyncio.gather(long, line.ask("revisit", revisit))

    assert [each.tokens for each in engine.do(story)] == [answers(cold), answers(revisit)]
    assert line.ended == ["revisit", "cold"]
    assert pacer(engine).overtaking.count == 1


def test_a_long_prompt_is_overtaken_by_no_more_tokens_than_its_share(
    start: Start, answers: Callable[..., list[int]]
) -> None:
    engine = start(("alternate", {"overtaken_share": 0.3}))
    line = Line(engine)
    shorter = [random_prompt(100, 10 + place) for place in range(6)]

    async def story() -> list[Ended]:
        long = await line.ask_in_chunks("long", LONG)
        return await asyncio.gather(long, *(line.ask(str(place), prompt) for place, prompt in enumerate(shorter)))

    assert [each.tokens for each in engine.do(story)] == [answers(prompt) for prompt in (LONG, *shorter)]
    assert pacer(engine).overtaking.count == 4  # 0.3 of some 1,400 tokens


def test_a_more_important_prompt_is_not_overtaken(start: Start, answers: Callable[..., list[int]]) -> None:
    engine = start()
    line = Line(engine)

    async def story() -> list[Ended]:
        session = engine._next_session
        long = await line.ask_in_chunks("long", LONG)
        (seq,) = engine.scheduler.sessions[session].sequences.values()
        CARRIED_URGENCY.carry(seq.sampling_param, Urgency(priority=Priority.HIGH))
        return await asyncio.gather(long, line.ask("shorter", SHORTER))

    assert [each.tokens for each in engine.do(story)] == [answers(LONG), answers(SHORTER)]
    assert line.ended == ["long", "shorter"]


@pytest.mark.parametrize("cancelled", ["long", "middle", "both"])
def test_a_cancelled_prompt_leaves_the_chunks_of_the_others_as_they_were(
    start: Start, answers: Callable[..., list[int]], cancelled: str
) -> None:
    engine = start()
    line = Line(engine)

    async def story() -> dict[str, Ended]:
        first = engine._next_session
        tasks = [await line.ask_in_chunks("long", LONG), await line.ask_in_chunks("middle", MIDDLE)]
        for session in {"long": [first], "middle": [first + 1], "both": [first, first + 1]}[cancelled]:
            await engine.local.engine.create_instance().async_cancel(session)
        tasks.append(line.ask("shorter", SHORTER))
        return {task.get_name(): await task for task in tasks}

    found = engine.do(story)
    prompts = {"long": LONG, "middle": MIDDLE, "shorter": SHORTER}
    gone = {"both": {"long", "middle"}}.get(cancelled, {cancelled})
    assert {name for name, ended in found.items() if ended.how == "CANCEL"} == gone
    for name in prompts.keys() - gone:
        assert found[name] == Ended("FINISH", answers(prompts[name]))
    assert not pacer(engine).overtaking.has_parked


def test_an_overtaking_prompt_without_room_gives_its_blocks_to_the_one_that_it_overtook(
    start: Start, answers: Callable[..., list[int]], tiny_llama: Path
) -> None:
    engine = start(num_gpu_blocks=110, enable_prefix_caching=False)  # the long prompt takes 95
    line = Line(engine)
    answered, tokens = random_prompt(1120, 6), 60

    async def story() -> list[Ended]:
        answer = asyncio.create_task(engine.follow(answered, new_tokens=tokens))
        await until(lambda: engine._got_tokens > 0)  # it has 71 blocks
        long = await line.ask_in_chunks("long", LONG)  # it has 4 or 8 of the 38
        return await asyncio.gather(answer, long, line.ask("middle", MIDDLE))  # it needs 36 of them

    expected = [greedy_reference(tiny_llama, [answered], tokens)[0], answers(LONG), answers(MIDDLE)]
    assert [each.tokens for each in engine.do(story)] == expected
    assert pacer(engine).overtaking.count == pacer(engine).overtaking.gave_way == 1
    assert line.ended == ["long", "middle"]


@pytest.mark.parametrize("after", ["lmdeploy", "alternate"])
def test_a_pace_is_exchanged_while_a_prompt_is_overtaken(
    start: Start, answers: Callable[..., list[int]], after: str
) -> None:
    engine = start()
    line = Line(engine)

    async def story() -> list[Ended]:
        long = await line.ask_in_chunks("long", LONG)
        middle = await line.ask_in_chunks("middle", MIDDLE)
        pacer(engine).swap(make_pace(after))
        return await asyncio.gather(long, middle)

    assert [each.tokens for each in engine.do(story)] == [answers(LONG), answers(MIDDLE)]
    assert line.ended == ["middle", "long"]


def test_prompts_whose_own_logits_are_kept_from_chunk_to_chunk_are_not_overtaken(
    start: Start, answers: Callable[..., list[int]]
) -> None:
    engine = start(logprobs_mode="raw_logprobs", enable_prefix_caching=False)
    line = Line(engine)

    async def losses(prompt: Sequence[int]) -> Any:
        from lmdeploy.messages import GenerationConfig

        config = GenerationConfig(max_new_tokens=1, top_k=1, return_ppl=True, ignore_eos=True)
        session, engine._next_session = engine._next_session, engine._next_session + 1
        last = None
        async for output in engine.local.engine.create_instance().async_stream_infer(
            session, list(prompt), gen_config=config
        ):
            last = output
        assert last is not None
        return last.ce_loss

    async def alone() -> Any:
        return await losses(LONG)

    async def beside() -> list[Any]:
        session = engine._next_session
        task = asyncio.create_task(losses(LONG))
        await until(lambda: line.is_active(session) and line.chunker.next_step > 0)
        return await asyncio.gather(task, line.ask("shorter", SHORTER))

    expected = engine.do(alone)
    loss, shorter = engine.do(beside)
    assert loss == pytest.approx(expected)
    assert shorter.tokens == answers(SHORTER)
    assert pacer(engine).overtaking.count == 0


@pytest.mark.parametrize("interruption", ["sleep", "weights"])
def test_an_interruption_while_a_prompt_is_overtaken_leaves_an_engine_that_answers(
    start: Start, answers: Callable[..., list[int]], interruption: str
) -> None:
    engine = start()
    line = Line(engine)

    async def story() -> list[Ended]:
        long = await line.ask_in_chunks("long", LONG)
        middle = await line.ask_in_chunks("middle", MIDDLE)
        assert pacer(engine).overtaking.has_parked
        await (engine.sleep_and_wake() if interruption == "sleep" else compute_all_anew(engine))
        return await asyncio.gather(long, middle)

    found = engine.do(story)
    if interruption == "sleep":
        assert {each.how for each in found} == {"CANCEL"}
    else:
        assert [each.tokens for each in found] == [answers(LONG), answers(MIDDLE)]
    assert not pacer(engine).overtaking.has_parked

    async def again() -> Ended:
        return await engine.follow(SHORTER, new_tokens=NEW_TOKENS)

    assert engine.do(again) == Ended("FINISH", answers(SHORTER))


async def compute_all_anew(engine: DisturbedEngine) -> None:
    from engines.lmdeploy.pauses import compute_anew

    async with engine.agent.pauses.pause():
        compute_anew(engine.local.engine)


@pytest.mark.parametrize(("blocks", "caching"), [(160, True), (72, True), (72, False)])
@pytest.mark.parametrize("seed", [0, 1])
def test_any_mixture_of_lengths_and_cancels_gives_the_same_tokens(
    start: Start, answers: Callable[..., list[int]], blocks: int, seed: int, *, caching: bool
) -> None:
    engine = start(num_gpu_blocks=blocks, enable_prefix_caching=caching)
    line = Line(engine)
    dice = random.Random(seed)  # noqa: S311 - not for secrets
    lengths = [dice.choice([20, 70, 150, 280, 400, 600, 900]) for _ in range(10)]
    prompts = [random_prompt(length, 40 + length) for length in lengths]
    cancelled = set(dice.sample(range(10), 3))

    async def story() -> dict[str, Ended]:
        tasks = []
        for place, prompt in enumerate(prompts):
            session = engine._next_session
            tasks.append(line.ask(str(place), prompt))
            await until(lambda asked=session: engine._next_session > asked)
            goal = engine.scheduler.scheduler_tick + dice.randrange(6)
            await until(lambda goal=goal: engine.scheduler.scheduler_tick >= goal or not engine.running)
            if place in cancelled:
                await engine.local.engine.create_instance().async_cancel(session)
        return {task.get_name(): await task for task in tasks}

    for name, ended in engine.do(story).items():
        assert ended.how == "FINISH" or int(name) in cancelled
        if ended.how == "FINISH":
            assert ended.tokens == answers(prompts[int(name)])
    assert not pacer(engine).overtaking.has_parked
