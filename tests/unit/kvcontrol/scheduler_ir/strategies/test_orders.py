"""What is each strategy's own: whom it prefers, and where that ends."""

import pytest

from kvcontrol.kv_policy import PolicyError
from kvcontrol.kv_policy.spec import parse_spec
from kvcontrol.scheduler_ir.strategies import (
    STRATEGIES,
    AgedQueue,
    EngineView,
    WaitingId,
    WaitingRequest,
    hand_over,
    make_strategy,
)
from kvcontrol.scheduler_ir.strategies.adaptive import AdaptiveOrder


def ask(name: str, arrived_s: float = 0.0, **more: object) -> WaitingRequest:
    return WaitingRequest(request_id=WaitingId(name), arrived_s=arrived_s, **more)  # type: ignore[arg-type]


def queue_of(strategy: str, *requests: WaitingRequest, **parameters: float) -> AgedQueue:
    queue = make_strategy(strategy, parameters)
    for request in requests:
        queue.add(request)
    return queue


def order(queue: AgedQueue, now_s: float, view: EngineView | None = None) -> str:
    return " ".join(each.request_id for each in queue.peek(999, now_s, view or EngineView()))


def test_priority_puts_a_newcomer_of_a_higher_class_before_64_that_wait() -> None:
    queue = queue_of("priority", *(ask(f"r{number}", number / 10) for number in range(64)))
    queue.add(ask("high", 10.0, priority=1))
    assert queue.take(1, 10.0)[0].request_id == "high"


def test_priority_is_strict_until_the_bound_and_by_age_from_then_on() -> None:
    queue = queue_of("priority", ask("low", 0.0, priority=-1), ask("high", 29.0, priority=1), ageing_bound_s=30)
    assert order(queue, 29.9) == "high low"
    assert order(queue, 30.0) == "low high"
    queue.start(WaitingId("low"), 30.0)
    queue.start(WaitingId("high"), 30.0)
    assert queue.promotions == 1


def test_priority_lets_what_is_cached_pass_a_cold_prompt_that_came_not_much_earlier() -> None:
    cold = ask("cold", 0.0, prefill_tokens=8000)
    turns = [ask("soon", 1.9, prefill_tokens=300), ask("late", 2.0, prefill_tokens=300)]
    assert order(queue_of("priority", cold, *turns), 3.0) == "soon cold late"
    assert order(queue_of("priority", cold, *turns, prefill_weight_s=0), 3.0) == "cold soon late"
    assert order(queue_of("priority", cold, ask("low", 0.0, priority=-1)), 3.0) == "cold low"


def test_slo_aware_takes_the_earliest_deadline_whatever_its_class() -> None:
    queue = queue_of(
        "slo_aware",
        ask("late", 0.0, deadline_s=9.0, priority=1),
        ask("soon", 1.0, deadline_s=5.0, priority=-1),
        ask("none", 0.5),
        patience_s=7,
    )
    assert order(queue, 2.0) == "soon none late"


def test_slo_aware_lets_what_cannot_be_met_any_more_wait_for_the_others() -> None:
    queue = queue_of(
        "slo_aware",
        ask("missed", 0.0, deadline_s=3.0),
        ask("long", 0.0, deadline_s=5.0, prefill_tokens=4000),
        ask("short", 1.0, deadline_s=8.0, prefill_tokens=10),
    )
    assert order(queue, 2.0) == "missed long short"
    assert order(queue, 3.0) == "long short missed"
    assert order(queue, 3.0, EngineView(prefill_tokens_per_s=1000)) == "short missed long"
    assert order(queue, 3.0, EngineView(prefill_tokens_per_s=100_000)) == "long short missed"


def test_aegaeon_runs_a_group_together_and_caps_it() -> None:
    names = ["a1", "b1", "a2", "a3", "b2", "a4"]
    queue = queue_of("aegaeon", *(ask(name, number, model=name[0]) for number, name in enumerate(names)), group_size=3)
    assert order(queue, 6.0) == "a1 a2 a3 b1 b2 a4"


def test_aegaeon_opens_a_new_group_where_the_old_one_has_been_served() -> None:
    queue = queue_of("aegaeon", ask("a1", prefix=7), ask("b1", prefix=8))
    queue.start(WaitingId("a1"), 1.0)
    queue.add(ask("a2", 2.0, prefix=7))
    assert order(queue, 2.0) == "b1 a2"


def test_hybrid_weighs_class_deadline_and_prefix_in_seconds() -> None:
    queue = queue_of(
        "hybrid",
        ask("old", 0.0),
        ask("high", 9.0, priority=1),
        ask("higher too late", 11.0, priority=1),
        ask("due", 5.0, deadline_s=8.0),
        class_s=10,
        patience_s=10,
    )
    assert order(queue, 12.0) == "due high old higher too late"


def test_hybrid_brings_the_next_of_a_prefix_forward_once_and_by_a_bound() -> None:
    queue = queue_of(
        "hybrid",
        ask("p1", 0.0, prefix=5),
        ask("q1", 1.0, prefix=6),
        ask("p2", 2.5, prefix=5),
        ask("p3", 3.5, prefix=5),
        locality_s=2,
    )
    queue.start(WaitingId("p1"), 4.0)
    assert order(queue, 4.0) == "p2 q1 p3"
    queue.start(WaitingId("p2"), 5.0)
    assert order(queue, 5.0) == "q1 p3", "a second start of the prefix gave it another two seconds"


def test_adaptive_follows_classes_then_deadlines_then_what_can_be_saved() -> None:
    queue = make_strategy("adaptive", {"dwell_s": 0, "ageing_bound_s": 10_000})
    assert queue.state == "calm: priority"
    for number in range(40):
        queue.add(ask(f"r{number}", number / 100, deadline_s=25.0, priority=number % 2))
    now_s = 1.0
    for _ in range(8):
        now_s += 1.0
        queue.take(1, now_s)
    assert queue.state == "pressed: slo_aware", "32 wait, one starts a second, and 15 s are left"
    now_s = 26.0
    for _ in range(8):
        now_s += 1.0
        queue.take(1, now_s)
    assert queue.state == "drowning: hybrid"
    for number in range(40):
        queue.add(ask(f"s{number}", now_s))
    while queue:
        now_s += 0.01
        queue.take(1, now_s)
    for number in range(8):
        queue.add(ask(f"t{number}", now_s, deadline_s=now_s + 100))
        queue.take(1, now_s)
    assert queue.state == "calm: priority"


def test_adaptive_notes_missed_deadlines_while_it_follows_another_order() -> None:
    """Else the step that turns to deadlines would find thousands of them missed at once."""
    queue = make_strategy("adaptive", {"ageing_bound_s": 10_000, "dwell_s": 3600})
    for number in range(100):
        queue.add(ask(f"r{number}", number / 10, deadline_s=number / 10 + 5))
    adaptive = queue._order
    assert isinstance(adaptive, AdaptiveOrder)
    for second in range(12):
        queue.add(ask(f"s{second}", float(second), priority=1))
        assert queue.take(1, float(second))[0].request_id == f"s{second}"
        assert queue.state == "calm: priority"
        assert len(adaptive._deadlines._missed) == max(0, (second - 5) * 10 + 1)
    queue.check_integrity()


def test_adaptive_does_not_change_its_mind_within_the_dwell() -> None:
    queue = make_strategy("adaptive", {"dwell_s": 50})
    for number in range(30):
        queue.add(ask(f"r{number}", deadline_s=2.0))
    seen = set()
    for second in range(20):
        queue.take(1, float(second))
        seen.add(queue.state)
    assert seen == {"calm: priority"}


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("best", "unknown strategy 'best'; known: fifo, priority, slo_aware, adaptive, aegaeon, hybrid"),
        ("fifo(size=1)", "strategy fifo has no parameter 'size': it has ageing_bound_s"),
        ("priority(ageing_bound_s=0)", "ageing_bound_s is 0; allowed is a number from 0.001 to 86400"),
        ("aegaeon(group_size=1.5)", "group_size is 1.5; allowed is a whole number from 1 to 4096"),
        ("hybrid(class_s=nan)", "class_s is nan"),
    ],
)
def test_a_strategy_that_cannot_be_is_refused_with_what_there_is(written: str, why: str) -> None:
    choice = parse_spec(written)
    with pytest.raises(PolicyError) as refusal:
        make_strategy(choice.name, choice.parameters)
    assert why in str(refusal.value)


def test_every_strategy_says_in_its_file_what_it_does_and_where_it_is_from() -> None:
    for name, kind in STRATEGIES.items():
        module = __import__(f"kvcontrol.scheduler_ir.strategies.{name}", fromlist=["__doc__"])
        assert "Source:" in (module.__doc__ or ""), name
        assert kind.summary
        assert make_strategy(name).name == name


@pytest.mark.parametrize("bound_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_bound_that_is_no_time_is_refused(bound_s: float) -> None:
    with pytest.raises(ValueError, match="ageing_bound_s is"):
        AgedQueue(make_strategy("fifo")._order, ageing_bound_s=bound_s)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_request_whose_times_are_no_numbers_is_refused(bad: float) -> None:
    queue = make_strategy("hybrid")
    for request in (ask("a", bad), ask("a", deadline_s=bad)):
        with pytest.raises(ValueError, match="has a time that is no number"):
            queue.add(request)
    assert not queue


def test_handing_over_to_a_queue_that_refuses_changes_neither() -> None:
    old = queue_of("fifo", ask("a"), ask("b", 1.0))
    new = queue_of("priority", ask("b", 5.0))
    with pytest.raises(ValueError, match="waits already"):
        hand_over(old, new)
    assert (order(old, 6.0), order(new, 6.0)) == ("a b", "b")
