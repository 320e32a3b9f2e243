"""What every strategy promises, whatever its order: all that ship, and the naive twin of each."""

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvcontrol.scheduler_ir.strategies import (
    STRATEGIES,
    EngineView,
    WaitingId,
    WaitingQueue,
    WaitingRequest,
    hand_over,
    make_strategy,
)
from lab.research.naive_queue import NaiveQueue
from tests.support.examples import examples

BOUND_S = 20.0
MAKERS: dict[str, Callable[[], WaitingQueue]] = {
    **{name: partial(make_strategy, name, {"ageing_bound_s": BOUND_S}) for name in STRATEGIES},
    **{f"naive {name}": partial(NaiveQueue, name, ageing_bound_s=BOUND_S) for name in STRATEGIES},
}


@pytest.fixture(params=MAKERS.values(), ids=MAKERS.keys())
def make(request: pytest.FixtureRequest) -> Callable[[], WaitingQueue]:
    return request.param


def asked(  # noqa: PLR0913 - by name
    number: int,
    *,
    arrived_s: float = 0.0,
    priority: int = 0,
    deadline_s: float | None = None,
    prefix: int = 0,
    model: str = "",
    prefill_tokens: int = 100,
) -> WaitingRequest:
    return WaitingRequest(
        request_id=WaitingId(str(number)),
        arrived_s=arrived_s,
        priority=priority,
        deadline_s=deadline_s,
        prefix=prefix,
        model=model,
        prefill_tokens=prefill_tokens,
    )


MIXED = [
    asked(
        number,
        arrived_s=number / 10,
        priority=number % 3 - 1,
        deadline_s=None if number % 4 else 3.0 + number * 7 % 11,
        prefix=number % 5,
        prefill_tokens=50 * (number % 7),
    )
    for number in range(60)
]


def names(requests: list[WaitingRequest]) -> list[str]:
    return [request.request_id for request in requests]


def test_taking_until_nothing_is_left_gives_each_request_once(make: Callable[[], WaitingQueue]) -> None:
    queue = make()
    for request in MIXED:
        queue.add(request)
    for number in range(0, 60, 7):
        assert queue.remove(WaitingId(str(number))) is MIXED[number]
    taken: list[WaitingRequest] = []
    while queue:
        taken += queue.take(4, 7.0 + len(taken) / 10)
        queue.check_integrity()
    assert sorted(map(int, names(taken))) == [number for number in range(60) if number % 7]


def test_requests_that_nothing_distinguishes_go_in_the_order_of_their_coming(make: Callable[[], WaitingQueue]) -> None:
    queue = make()
    for number in (3, 1, 2, 5, 4):
        queue.add(asked(number, arrived_s=1.0))
    assert names(queue.take(5, 2.0)) == ["3", "1", "2", "5", "4"]


def test_looking_twice_shows_the_same_and_what_is_taken_then(make: Callable[[], WaitingQueue]) -> None:
    queue = make()
    for request in MIXED:
        queue.add(request)
    for now_s in (6.0, 9.0, 24.0, 26.0):
        seen = queue.peek(8, now_s)
        assert queue.peek(8, now_s) == seen
        assert queue.peek(3, now_s) == seen[:3]
        assert queue.peek(999, now_s)[:8] == seen
        assert len(queue.peek(999, now_s)) == len(queue)
        assert queue.take(8, now_s) == seen


def test_the_same_calls_make_the_same_order(make: Callable[[], WaitingQueue]) -> None:
    orders = []
    for _ in range(2):
        queue = make()
        for request in MIXED:
            queue.add(request)
        orders.append([names(queue.take(7, 6.0 + step)) for step in range(9)])
    assert orders[0] == orders[1]


def test_whoever_has_waited_for_the_bound_goes_first_and_by_age(make: Callable[[], WaitingQueue]) -> None:
    queue = make()
    queue.add(asked(1, arrived_s=1.0, priority=-1, prefill_tokens=10_000))
    queue.add(asked(0, arrived_s=0.0, priority=-1, deadline_s=0.5))
    for number in range(2, 40):
        queue.add(asked(number, arrived_s=2.0, priority=1, deadline_s=30.0))
    assert names(queue.peek(3, 1.0 + BOUND_S))[:2] == ["0", "1"]


def test_nobody_starves_while_others_keep_coming_faster_than_they_are_served(
    make: Callable[[], WaitingQueue],
) -> None:
    """Two come for each that is served, all more urgent: still only who came before it goes after the bound."""
    queue = make()
    poor = asked(0, arrived_s=0.0, priority=-5)
    queue.add(poor)
    number, now_s, started = 0, 0.0, []
    while poor.request_id in queue:
        now_s += 0.5
        for _ in range(2):
            number += 1
            queue.add(asked(number, arrived_s=now_s, priority=5, deadline_s=now_s + 1.0, prefix=1))
        started += queue.take(1, now_s)
        assert now_s <= BOUND_S + 0.5, "it waits although its time has come"
    assert started[-1] is poor


def test_a_second_request_of_one_name_is_refused_and_nothing_has_changed(make: Callable[[], WaitingQueue]) -> None:
    queue = make()
    queue.add(asked(1))
    with pytest.raises(ValueError, match="request 1 waits already"):
        queue.add(asked(1, priority=3))
    assert queue.take(5, 1.0) == [asked(1)]


def test_who_does_not_wait_cannot_leave_or_start(make: Callable[[], WaitingQueue]) -> None:
    queue = make()
    with pytest.raises(KeyError):
        queue.remove(WaitingId("1"))
    with pytest.raises(KeyError):
        queue.start(WaitingId("1"), 1.0)
    assert (len(queue), list(queue), queue.peek(3, 1.0), queue.take(0, 1.0)) == (0, [], [], [])


@pytest.mark.parametrize("target", STRATEGIES)
@pytest.mark.parametrize("source", STRATEGIES)
def test_a_queue_is_handed_to_any_other_strategy_whole(source: str, target: str) -> None:
    old, new = make_strategy(source), make_strategy(target)
    for request in MIXED:
        old.add(request)
    old.take(5, 6.0)
    waiting = {request.request_id for request in old}
    hand_over(old, new)
    assert {request.request_id for request in new} == {request.request_id for request in old} == waiting
    new.check_integrity()


class TwoQueues(RuleBasedStateMachine):
    """One strategy and its naive twin are told the same."""

    name = ""

    @initialize()
    def begin(self) -> None:
        self.queue = make_strategy(self.name, {"ageing_bound_s": BOUND_S})
        self.naive = NaiveQueue(self.name, ageing_bound_s=BOUND_S)
        self.now_s = 0.0
        self.number = 0

    @rule(
        late_s=st.sampled_from([0.0, 0.5, 5.0]),
        priority=st.integers(-1, 1),
        due_s=st.none() | st.sampled_from([0.0, 1.0, 3.0, 15.0]),
        prefix=st.integers(0, 3),
        tokens=st.sampled_from([0, 100, 2000]),
    )
    def come(self, late_s: float, priority: int, due_s: float | None, prefix: int, tokens: int) -> None:
        self.number += 1
        request = asked(
            self.number,
            arrived_s=max(0.0, self.now_s - late_s),
            priority=priority,
            deadline_s=None if due_s is None else self.now_s + due_s,
            prefix=prefix,
            prefill_tokens=tokens,
        )
        self.queue.add(request)
        self.naive.add(request)

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0, 9.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: len(self.queue))
    @rule(most=st.integers(1, 6), speed=st.sampled_from([0.0, 400.0]))
    def take(self, most: int, speed: float) -> None:
        view = EngineView(prefill_tokens_per_s=speed)
        assert names(self.queue.take(most, self.now_s, view)) == names(self.naive.take(most, self.now_s, view))

    @precondition(lambda self: len(self.queue))
    @rule(place=st.integers(0, 50), starts=st.booleans(), back=st.booleans())
    def leave(self, place: int, *, starts: bool, back: bool) -> None:
        waiting = self.naive.peek(999, self.now_s)
        request = waiting[place % len(waiting)]
        for queue in (self.queue, self.naive):
            if starts:
                queue.start(request.request_id, self.now_s)
            else:
                queue.remove(request.request_id)
            if back:
                queue.add(request)

    @invariant()
    def they_agree(self) -> None:
        self.queue.check_integrity()
        assert names(self.queue.peek(5, self.now_s)) == names(self.naive.peek(5, self.now_s))
        view = EngineView(prefill_tokens_per_s=300.0)
        assert names(self.queue.peek(999, self.now_s, view)) == names(self.naive.peek(999, self.now_s, view))
        assert self.queue.state == self.naive.state
        assert (self.queue.promotions, self.queue.oldest_s) == (self.naive.promotions, self.naive.oldest_s)


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_order_is_the_naive_one_after_any_calls(name: str) -> None:
    machine = type(name, (TwoQueues,), {"name": name})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples(25), stateful_step_count=30, deadline=None)
    )


@given(st.lists(st.tuples(st.integers(-2, 2), st.sampled_from(sorted(STRATEGIES))), min_size=1, max_size=30))
@settings(max_examples=examples(60), deadline=None)
def test_exchanging_strategies_in_between_loses_nobody_and_serves_nobody_twice(
    steps: list[tuple[int, str]],
) -> None:
    queue = make_strategy("fifo")
    served: list[WaitingRequest] = []
    for number, (priority, name) in enumerate(steps):
        queue.add(asked(number, arrived_s=float(number), priority=priority, prefix=abs(priority)))
        if number % 3 == 2:
            served += queue.take(1, float(number))
        other = make_strategy(name)
        hand_over(queue, other)
        queue = other
    served += queue.take(99, 100.0)
    assert sorted(map(int, names(served))) == list(range(len(steps)))
