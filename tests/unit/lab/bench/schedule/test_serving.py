from functools import partial

import pytest

from kvcontrol.scheduler_ir.strategies import STRATEGIES, WaitingId, WaitingRequest, make_strategy
from lab.bench.schedule.ordering import measure
from lab.bench.schedule.serving import EngineModel, Served, requests_of, serve

MODEL = EngineModel(prefill_tokens_per_s=1000, decode_s=0.1, slots=4, step_tokens=500)
LENGTHS = [(100 + 37 * number % 400, 1 + number % 9) for number in range(300)]


def served(strategy: str, load: float = 1.0) -> Served:
    asked = requests_of(LENGTHS, load=load, model=MODEL)
    return serve(partial(make_strategy, strategy), asked, workload="small", model=MODEL)


def one(number: int, at_s: float, prompt: int, answer: int) -> WaitingRequest:
    return WaitingRequest(
        request_id=WaitingId(f"r{number}"), arrived_s=at_s, prefill_tokens=prompt, output_tokens=answer, tenant="t"
    )


def test_one_request_takes_its_prefill_and_a_step_for_each_token() -> None:
    figures = serve(partial(make_strategy, "fifo"), [one(0, 5.0, 200, 3)], workload="one", model=MODEL)
    assert figures.wait_max_s == pytest.approx(0.2 + 0.1)
    assert figures.tokens_per_s == pytest.approx(203 / (5.0 + 0.3 + 0.2))


def test_no_more_run_than_there_are_slots_and_no_step_computes_more_than_it_can() -> None:
    asked = [one(number, 0.0, 300, 1) for number in range(3)]
    figures = serve(partial(make_strategy, "fifo"), asked, workload="three", model=MODEL)
    assert figures.wait_max_s == pytest.approx(3 * (0.3 + 0.1))
    slots = [one(number, 0.0, 1, 10) for number in range(5)]
    figures = serve(partial(make_strategy, "fifo"), slots, workload="five", model=MODEL)
    assert figures.wait_max_s == pytest.approx(0.004 + 0.1 + 9 * 0.1 + 0.001 + 0.1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_serves_everybody_and_computes_the_same(strategy: str) -> None:
    figures = served(strategy)
    assert figures.requests == 300
    assert figures.tokens_per_s == pytest.approx(served("fifo").tokens_per_s, rel=0.1)
    assert 0 <= figures.in_time_percent <= 100
    assert figures == served(strategy)


def test_important_requests_wait_less_where_importance_counts() -> None:
    assert served("priority", load=2.0).high_wait_p99_s < served("fifo", load=2.0).high_wait_p99_s


def test_a_step_is_timed_with_as_many_waiting_as_were_asked_for() -> None:
    times = measure(partial(make_strategy, "fifo"), waiting=200, steps=20)
    assert (times.strategy, times.waiting, times.steps) == ("fifo", 200, 20)
    assert 0 < times.p50_us <= times.p90_us <= times.p99_us <= times.max_us
