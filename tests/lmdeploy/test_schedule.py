"""The waiting queue of a running engine in a strategy's order: who starts next, and that nobody is lost."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engines.lmdeploy.schedule.scheduler import EngineQueue, queue_of
from engines.lmdeploy.schedule.urgency import CARRIED_URGENCY
from engines.requests.urgency import Urgency
from kvcontrol.core.priority import Priority
from kvcontrol.kv_policy.spec import parse_spec
from kvcontrol.scheduler_ir.strategies import STRATEGIES, AgedQueue, make_strategy
from tests.support.engine import ANSWER_WITHIN_S, LocalEngine
from tests.support.models import random_prompt

pytestmark = pytest.mark.engine

HOLDING_TOKENS = 600
PROMPTS = [random_prompt(20 + 7 * (number % 9), number) for number in range(64)]
HIGH = Urgency(priority=Priority.HIGH)
NORMAL = Urgency()
LOW = Urgency(priority=Priority.LOW)


@pytest.fixture(scope="module")
def _hooks(_cpu_engine: None) -> Iterator[None]:
    from engines.lmdeploy.hooks import schedule_hooks
    from engines.lmdeploy.patching import install

    undo = install(schedule_hooks())
    yield
    undo()


class Line:
    """An engine with one place in its batch, and everybody behind it."""

    def __init__(self, local: LocalEngine) -> None:
        self.local = local
        self.scheduler = local.engine.scheduler
        self.free_blocks = self._free()
        found = queue_of(self.scheduler)
        assert found is not None
        self.queue: EngineQueue = found
        self.started: list[int] = []
        self._changed = found.changed
        found.changed = self._watch  # type: ignore[method-assign]
        self._sessions = 1000

    def _watch(self, seq: Any, before: Any, after: Any) -> None:
        if before.name == "WAITING" and after.name == "READY":
            self.started.append(int(seq.session_id))
        self._changed(seq, before, after)

    def use(self, written: str) -> None:
        choice = parse_spec(written)
        self.queue.swap(make_strategy(choice.name, choice.parameters))

    def ask(self, prompt: Sequence[int], urgency: Urgency = NORMAL, *, new_tokens: int = 2) -> "Asked":
        self._sessions += 1
        return Asked(self, self._sessions, prompt, urgency, new_tokens)

    async def held(self) -> "Asked":
        """Return a request that runs, alone, for long."""
        holder = self.ask(random_prompt(8, 999), new_tokens=HOLDING_TOKENS)
        await holder.first.wait()
        self.started.clear()
        return holder

    async def until_waiting(self, count: int) -> None:
        while len(self.queue) != count:
            await asyncio.sleep(0.001)

    def _free(self) -> int:
        return int(self.scheduler.block_manager.get_num_free_gpu_blocks())

    async def check_nothing_is_left(self) -> None:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            while self.scheduler.sessions or self.scheduler.seq_manager._seq_map:
                await asyncio.sleep(0.001)
        assert len(self.queue) == 0
        assert self.queue._returned == {}
        self.queue._queue.check_integrity()
        assert {each.waiting for each in self.report().classes.values()} == {0}
        assert (self.queue.errors, self.queue.repairs, self._free()) == (0, 0, self.free_blocks)

    def report(self) -> Any:
        return self.queue.report(swaps=0, in_charge_s=0.0)


class Asked:
    """One request of the line."""

    def __init__(self, line: Line, session: int, prompt: Sequence[int], urgency: Urgency, new_tokens: int) -> None:
        self.session = session
        self.first = asyncio.Event()
        self.tokens: list[int] = []
        self.task = asyncio.create_task(self._run(line, prompt, urgency, new_tokens))

    async def _run(self, line: Line, prompt: Sequence[int], urgency: Urgency, new_tokens: int) -> list[int]:
        from lmdeploy.messages import GenerationConfig

        config = GenerationConfig(max_new_tokens=new_tokens, top_k=1, top_p=1.0, temperature=1.0, ignore_eos=True)
        CARRIED_URGENCY.carry(config, urgency)
        instance = line.local.engine.create_instance()
        async for output in instance.async_stream_infer(self.session, list(prompt), gen_config=config):
            self.tokens.extend(output.token_ids)
            self.first.set()
        return self.tokens

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture(scope="module")
def line(_hooks: None, tiny_llama: Path) -> Iterator[Line]:
    with LocalEngine.start(tiny_llama, max_batch_size=1, num_gpu_blocks=64, enable_prefix_caching=False) as local:
        yield Line(local)


@pytest.fixture(autouse=True)
def _fresh(line: Line) -> None:
    line.use("fifo")
    line.use("priority(prefill_weight_s=0)")
    line.started.clear()


def run(line: Line, story: Any) -> Any:
    async def bounded() -> Any:
        line.local.engine.start_loop()
        async with asyncio.timeout(ANSWER_WITHIN_S):
            result = await story
        await line.check_nothing_is_left()
        return result

    return line.local.runner.run(bounded())


async def finished(*asked: Asked) -> list[list[int]]:
    return await asyncio.gather(*(each.task for each in asked))


def test_an_important_request_behind_64_starts_next(line: Line) -> None:
    async def story() -> None:
        holder = await line.held()
        waiting = [line.ask(prompt) for prompt in PROMPTS]
        await line.until_waiting(64)
        important = line.ask(random_prompt(30, 500), HIGH)
        await line.until_waiting(65)
        assert not holder.task.done()
        await holder.leave()
        await finished(important, *waiting)
        assert line.started[0] == important.session
        assert line.started[1:] == [each.session for each in waiting], "the others in the order of their coming"

    run(line, story())


@pytest.mark.usefixtures("_hooks")
def test_a_turn_whose_history_is_cached_passes_a_cold_prompt(tiny_llama: Path) -> None:
    history, cold = random_prompt(200, 1), random_prompt(210, 2)
    with LocalEngine.start(tiny_llama, max_batch_size=1, num_gpu_blocks=128, enable_prefix_caching=True) as local:
        line = Line(local)
        line.use("priority(prefill_weight_s=1000)")

        async def story() -> None:
            await finished(line.ask(history))
            holder = await line.held()
            first = line.ask(cold)
            await line.until_waiting(1)
            turns = [line.ask([*history, *random_prompt(10, 3)]), line.ask(random_prompt(100, 4))]
            await line.until_waiting(3)
            await holder.leave()
            await finished(first, *turns)
            assert line.started == [each.session for each in (turns[0], turns[1], first)]
            assert (line.queue.errors, line.queue.repairs) == (0, 0)

        async def bounded() -> None:
            local.engine.start_loop()
            async with asyncio.timeout(ANSWER_WITHIN_S):
                await story()

        local.runner.run(bounded())


def test_answers_are_those_of_lmdeploys_own_order(line: Line) -> None:
    async def story(strategy: str) -> list[list[int]]:
        line.use(strategy)
        holder = await line.held()
        chooser = random.Random(5)  # noqa: S311 - reproducible
        asked = [
            line.ask(
                prompt, Urgency(priority=chooser.choice(list(Priority)), first_token_s=chooser.choice([None, 0.5]))
            )
            for prompt in PROMPTS[:12]
        ]
        await line.until_waiting(12)
        await holder.leave()
        return await finished(*asked)

    answers = {strategy: run(line, story(strategy)) for strategy in STRATEGIES}
    alone = line.local.generate_each([(prompt, _two_tokens()) for prompt in PROMPTS[:12]])
    assert all(answer == alone for answer in answers.values()), answers.keys()


def _two_tokens() -> Any:
    from tests.support.engine import Sampling

    return Sampling(new_tokens=2)


def test_deadlines_decide_where_the_strategy_says_so(line: Line) -> None:
    async def story() -> None:
        line.use("slo_aware(patience_s=1000)")
        holder = await line.held()
        asked = [line.ask(PROMPTS[number], Urgency(first_token_s=300.0 - number)) for number in range(8)]
        asked.append(line.ask(PROMPTS[8], LOW))
        await line.until_waiting(9)
        await holder.leave()
        await finished(*asked)
        assert line.started == [each.session for each in [*reversed(asked[:8]), asked[8]]]

    run(line, story())


def test_what_has_waited_for_the_bound_starts_before_what_is_more_important(line: Line) -> None:
    async def story() -> None:
        line.use("priority(ageing_bound_s=0.5)")
        promotions = line.report().promotions
        holder = await line.held()
        old = [line.ask(PROMPTS[number], LOW) for number in range(3)]
        await line.until_waiting(3)
        await asyncio.sleep(0.6)
        new = line.ask(PROMPTS[3], HIGH)
        await line.until_waiting(4)
        await holder.leave()
        await finished(new, *old)
        assert line.started == [each.session for each in [*old, new]]
        assert line.report().promotions >= promotions + 3
        assert line.report().classes["low"].longest_wait_s >= 0.5

    run(line, story())


def test_nobody_is_lost_when_strategies_change_under_load(line: Line) -> None:
    async def story() -> list[list[int]]:
        holder = await line.held()
        chooser = random.Random(6)  # noqa: S311 - reproducible
        asked = [line.ask(prompt, chooser.choice([HIGH, NORMAL, LOW])) for prompt in PROMPTS]
        await line.until_waiting(64)
        await holder.leave()
        names = list(STRATEGIES)
        for number, each in enumerate(asked):
            await each.first.wait()
            line.use(names[number % len(names)])
        return await finished(*asked)

    answers = run(line, story())
    assert [len(answer) for answer in answers] == [2] * 64
    assert len(line.started) == len(set(line.started)) == 64


def test_random_cancels_leave_no_block_and_no_session_behind(line: Line) -> None:
    async def story() -> None:
        chooser = random.Random(7)  # noqa: S311 - reproducible
        for _ in range(2):
            asked = [line.ask(prompt, chooser.choice([HIGH, NORMAL, LOW]), new_tokens=12) for prompt in PROMPTS]
            for each in chooser.sample(asked, 48):
                await asyncio.sleep(chooser.choice([0.0, 0.0, 0.002]))
                await each.leave()
            done = await asyncio.gather(*(each.task for each in asked), return_exceptions=True)
            assert all(isinstance(each, asyncio.CancelledError) or len(each) == 12 for each in done)

    run(line, story())


def test_a_strategy_that_fails_hands_over_to_lmdeploys_order_and_says_so(
    line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(AgedQueue):
        def peek(self, *args: Any, **kwargs: Any) -> Any:
            raise ZeroDivisionError(args, kwargs)

    async def story() -> None:
        holder = await line.held()
        asked = [line.ask(prompt) for prompt in PROMPTS[:8]]
        await line.until_waiting(8)
        line.queue.swap(Broken(make_strategy("fifo")._order))
        await holder.leave()
        await finished(*asked[:4])
        assert (line.queue.strategy, line.queue.errors) == ("lmdeploy", 1)
        assert "LMDeploy's own order is in charge" in caplog.text
        line.use("priority")
        await finished(*asked)
        assert line.queue.strategy == "priority"
        line.queue.errors = 0

    run(line, story())


def test_what_is_preempted_comes_back_and_is_seen_wherever_it_stands(tiny_llama: Path) -> None:
    with LocalEngine.start(
        tiny_llama, max_batch_size=8, num_gpu_blocks=16, session_len=224, enable_prefix_caching=False
    ) as local:
        line = Line(local)
        line.queue.window = 2

        async def story() -> list[list[int]]:
            chooser = random.Random(8)  # noqa: S311 - reproducible
            asked = [line.ask(PROMPTS[n], chooser.choice([HIGH, NORMAL, LOW]), new_tokens=60) for n in range(12)]
            return await finished(*asked)

        answers = run(line, story())
        assert [len(answer) for answer in answers] == [60] * 12
        assert local.preempted, "the pool was not small enough"
        assert line.report().returned > 0


def test_engine_steps_look_at_a_window_of_what_waits(line: Line) -> None:
    async def story() -> None:
        holder = await line.held()
        line.queue.window = 8
        asked = [line.ask(PROMPTS[number], LOW) for number in range(20)]
        await line.until_waiting(20)
        assert len(line.scheduler.waiting) == 8
        assert line.scheduler.num_waiting() == 20
        await holder.leave()
        await finished(*asked)

    run(line, story())
    line.queue.window = 64


def test_the_benchmark_of_what_waits_measures_a_real_scheduler_and_leaves_nothing(line: Line) -> None:
    from lab.bench.schedule.waiting import measure

    times = measure(line.local.engine, waiting=200, steps=5, strategy="hybrid")
    assert (times.order, times.waiting) == ("hybrid", 200)
    assert min(times.front_p50_us, times.look_p50_us, times.schedule_p50_us) > 0
    assert (len(line.queue), line.scheduler.num_waiting(), line.queue.errors) == (0, 0, 0)
