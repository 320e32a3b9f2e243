"""Who goes next in a simulated engine, by arrival or by a strategy, and that nobody is lost when it is swapped."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.control.errors import RefusedError
from engines.requests.urgency import Urgency
from engines.sim.engine import SimEngine
from engines.sim.policies import SimPolicies
from engines.sim.sequence import Phase, SimRequest, SimSequence
from kvcontrol.core.policy_control import PolicyInCharge
from kvcontrol.core.priority import Priority
from kvcontrol.scheduler_ir.strategies import STRATEGIES, make_strategy
from tests.support.examples import examples
from tests.support.simulated import Listening, engine, finish, request, run

HIGH, NORMAL, LOW = Priority.HIGH, Priority.NORMAL, Priority.LOW


def requested(
    name: str, priority: Priority = NORMAL, due_s: float | None = None, *, blocks: int = 1, output: int = 4
) -> SimRequest:
    urgency = Urgency(priority=priority, first_token_s=due_s)
    return replace(request(name, range(blocks), output=output), urgency=urgency)


def busy() -> tuple[SimEngine, Listening, SimPolicies]:
    """An engine with one place, taken by ``running``."""
    heard = Listening()
    one = engine(heard, max_batch=1)
    one.submit(requested("running", output=20), 0.0)
    return one, heard, SimPolicies(one)


def put(policies: SimPolicies, name: str, **more: Any) -> PolicyInCharge:
    return policies.swap(msgspec.json.encode({"kind": "schedule", "name": name, **more})).policies[-1]


def order(heard: Listening) -> list[str]:
    return [each.request.request_id for each in heard.over]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("fifo", ["running", "a", "b", "c", "d"]),
        ("priority", ["running", "d", "b", "c", "a"]),
        ("slo_aware", ["running", "c", "d", "a", "b"]),
    ],
)
def test_the_strategy_says_who_is_next(strategy: str, expected: list[str]) -> None:
    one, heard, policies = busy()
    put(policies, strategy)
    for each in (requested("a", LOW), requested("b"), requested("c", due_s=5.0), requested("d", HIGH, 9.0)):
        one.submit(each, 0.01)
    finish(one)
    assert order(heard) == expected


WAVES = st.lists(st.tuples(st.floats(0, 2), st.integers(0, 3), st.integers(1, 20)), max_size=20)


@given(WAVES, st.sampled_from([0.05, 60.0]))
@settings(max_examples=examples(30), deadline=None)
def test_among_equals_priority_is_the_order_of_arrival(waves: list[tuple[float, int, int]], bound_s: float) -> None:
    def served(name: str, **parameters: float) -> list[tuple[int, float | None, float | None]]:
        one = engine(Listening(), hbm_blocks=16, max_batch=2)
        one.queue.swap(make_strategy(name, {"ageing_bound_s": bound_s, **parameters}))
        comes = sorted(waves)
        sequences = run(one, [(at_s, requested("", blocks=blocks, output=output)) for at_s, blocks, output in comes])
        return [(each.preempted, each.first_token_s, each.ended_s) for each in sequences]

    assert served("priority", prefill_weight_s=0) == served("fifo")


def test_an_exchange_takes_over_all_that_wait_and_counts_go_on() -> None:
    one, heard, policies = busy()
    for each in (requested("a", LOW), requested("b", LOW), requested("c", HIGH)):
        one.submit(each, 0.01)
    gone = one.submit(requested("gone", HIGH), 0.02)
    assert put(policies, "priority", params={"ageing_bound_s": 30}).effective_params == {
        "ageing_bound_s": 30,
        "prefill_weight_s": 0.25,
    }
    one.cancel(gone, 0.03)
    one.submit(requested("d"), 0.04)
    shown = put(policies, "hybrid", params={"class_s": 5})
    assert (shown.name, shown.params) == ("hybrid", {"class_s": 5})
    assert shown.effective_params == STRATEGIES["hybrid"].values({"class_s": 5})
    assert (again := put(policies, "hybrid", params={"class_s": 5}).schedule) is not None
    assert (again.waiting, again.oldest_s, again.swaps, again.ageing_bound_s) == (4, 0.03, 2, 60)
    finish(one)
    assert order(heard) == ["running", "c", "d", "a", "b"]
    report = put(policies, "fifo").schedule
    assert report is not None
    assert (report.waiting, report.oldest_s, report.promotions, report.swaps) == (0, 0, 0, 3)
    assert {name: (each.started, each.left) for name, each in report.classes.items()} == {
        "high": (1, 1),
        "normal": (2, 0),
        "low": (2, 0),
    }
    assert 0 < report.classes["low"].longest_wait_s < report.classes["low"].wait_s
    assert sum(report.classes["low"].buckets) == 2


@pytest.mark.parametrize("strategy", ["fifo", "priority"])
def test_who_has_waited_for_long_is_started_for_its_age(strategy: str) -> None:
    one, heard, policies = busy()
    put(policies, strategy, params={"ageing_bound_s": 0.01})
    for each in (requested("a", LOW), requested("b", HIGH)):
        one.submit(each, 0.02)
    finish(one)
    assert order(heard) == ["running", "a", "b"]
    assert one.queue.report(one.now_s, swaps=0, in_charge_s=0).promotions == 2


def test_one_that_was_preempted_goes_before_more_important_ones() -> None:
    heard = Listening()
    tight = engine(heard, hbm_blocks=16)
    tight.queue.swap(make_strategy("priority"))
    for number in range(3):
        tight.submit(requested(str(number), LOW, blocks=number and 1, output=40), 0.0)
    while not tight.counters.preemptions:
        tight.advance(tight.next_event_s)
        tight.check_integrity()
    tight.submit(requested("late", HIGH, output=40), tight.now_s)
    tight.queue.swap(make_strategy("slo_aware"))
    returned = tight.queue.first(tight.now_s, tight.running)
    assert returned.preempted
    tight.queue.swap(make_strategy("fifo"))
    tight.check_integrity()
    assert tight.queue.first(tight.now_s, tight.running) is returned
    finish(tight)
    assert sorted(order(heard)) == ["0", "1", "2", "late"]
    report = tight.queue.report(tight.now_s, swaps=0, in_charge_s=0)
    assert report.returned == tight.counters.preemptions
    assert report.classes["low"].started == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "nothing"}, "unknown strategy 'nothing'; known: fifo, priority"),
        ({"name": "priority", "tier": "ddr"}, "has no tier"),
        ({"name": "priority", "params": {"class_s": 1}}, "class_s"),
        ({"name": "fifo", "params": {"ageing_bound_s": -1}}, "ageing_bound_s"),
        ({"name": "fifo", "params": {"ageing_bound_s": "x"}}, "policies take numbers"),
        ({"kind": "other", "name": "lru"}, "this instance has eviction, shadow, schedule"),
    ],
)
def test_what_can_not_be_is_refused_and_changes_nothing(change: dict[str, Any], words: str) -> None:
    one, _, policies = busy()
    one.submit(requested("a"), 0.01)
    with pytest.raises(RefusedError, match=words):
        policies.swap(msgspec.json.encode({"kind": "schedule"} | change))
    shown = policies.report().policies[-1]
    assert shown.schedule is not None
    assert (shown.name, shown.params, shown.schedule.waiting, shown.schedule.swaps) == ("priority", {}, 1, 0)
    assert policies.refused == 1


SUBMIT = st.tuples(
    st.just("submit"),
    st.sampled_from(Priority),
    st.none() | st.floats(0, 3),
    st.integers(0, 4),
    st.integers(1, 30),
)
OPERATIONS = st.lists(
    SUBMIT
    | st.tuples(st.just("cancel"), st.integers(0, 40))
    | st.tuples(st.just("use"), st.sampled_from(sorted(STRATEGIES)), st.sampled_from([0.05, 60.0]))
    | st.tuples(st.just("advance"), st.floats(0, 0.5)),
    max_size=40,
)


@given(OPERATIONS, st.sampled_from([0, 30]))
@settings(max_examples=examples(60), deadline=None)
def test_nobody_is_lost_whatever_comes_leaves_and_is_exchanged(operations: list[tuple[Any, ...]], ddr: int) -> None:
    heard = Listening()
    tight = engine(heard, hbm_blocks=16, max_batch=3, ddr_blocks=ddr, nvme_blocks=2 * ddr)
    sequences: list[SimSequence] = []
    now_s = 0.0
    for number, operation in enumerate(operations):
        match operation:
            case "submit", priority, due_s, blocks, output:
                each = requested(str(number), priority, due_s, blocks=blocks, output=output)
                sequences.append(tight.submit(each, now_s))
            case "cancel", place if sequences:
                tight.cancel(sequences[place % len(sequences)], now_s)
            case "use", name, bound_s:
                tight.queue.swap(make_strategy(name, {"ageing_bound_s": bound_s}))
                assert tight.queue.strategy == name
            case "advance", seconds:
                now_s += seconds
                tight.advance(now_s)
        tight.check_integrity()
        assert set(tight.queue) == {each for each in sequences if each.phase is Phase.WAITING}
    while not tight.idle:
        tight.advance(tight.next_event_s)
        tight.check_integrity()
    assert all(each.phase is Phase.ENDED for each in sequences)
    assert tight.counters.ended + tight.counters.cancelled == len(sequences)
    report = tight.queue.report(tight.now_s, swaps=0, in_charge_s=0)
    assert report.waiting == 0
    assert report.returned == tight.counters.preemptions
    assert sum(each.started + each.left for each in report.classes.values()) == len(sequences)
    tight.close()
