"""The queue against a naive twin, and its shares against Jain's index."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission.fair_queue import FairQueue, Waiting
from gateway.types import TenantId
from kvcontrol.core.priority import Priority
from tests.support.examples import examples

LEVELS = {Priority.HIGH: 0, Priority.NORMAL: 1, Priority.LOW: 2}
AGEING_S = 10.0


def request(tenant: str, priority: Priority = Priority.NORMAL, *, work: float = 1.0, at_s: float = 0.0) -> Waiting:
    return Waiting(tenant=TenantId(tenant), weight=1.0, priority=priority, work=work, arrived_s=at_s)


def queue(bound: int = 1000) -> FairQueue:
    return FairQueue(bound=bound, ageing_s=AGEING_S)


class NaiveQueue:
    """Looks at everything each time."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.waiting: list[Waiting] = []
        self.counters: dict[TenantId, float] = {}
        self.last = 0.0
        self.number = 0

    def push(self, new: Waiting) -> Waiting | None:
        if all(each.tenant != new.tenant for each in self.waiting):
            floor = min((self.counters[each.tenant] for each in self.waiting), default=self.last)
            self.counters[new.tenant] = max(self.counters.get(new.tenant, 0.0), floor)
        if len(self.waiting) >= self.bound:
            lowest = max((LEVELS[each.priority] for each in self.waiting), default=-1)
            if lowest < LEVELS[new.priority]:
                return new
            counts = Counter(each.tenant for each in self.waiting if LEVELS[each.priority] == lowest)
            if lowest == LEVELS[new.priority] and counts[new.tenant] + 1 >= max(counts.values()):
                return new
            longest = max(counts.values())
            tenants = {tenant for tenant, count in counts.items() if count == longest}
            return next(
                each for each in reversed(self.waiting) if LEVELS[each.priority] == lowest and each.tenant in tenants
            )
        self.waiting.append(new)
        return None

    def pop(self, now_s: float) -> Waiting:
        def rank(each: Waiting) -> tuple[float, float, int]:
            level = max(0, LEVELS[each.priority] - int((now_s - each.arrived_s) / AGEING_S))
            return level, self.counters[each.tenant], self.waiting.index(each)

        best = min(self.waiting, key=rank)
        self.waiting.remove(best)
        if not self.waiting:
            self.last = max(self.last, self.counters[best.tenant])
        self.counters[best.tenant] += best.work / best.weight
        return best


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.sampled_from("abcde"), st.sampled_from(list(Priority)), st.integers(1, 50)),
        st.tuples(st.just("pop"), st.just(""), st.just(Priority.LOW), st.integers(0, 8)),
        st.tuples(st.just("leave"), st.just(""), st.just(Priority.LOW), st.integers(0, 100)),
    ),
    max_size=80,
)


@settings(max_examples=examples(300), deadline=None)
@given(STEPS, st.integers(1, 12))
def test_it_chooses_as_its_naive_twin_does(steps: list[tuple[str, str, Priority, int]], bound: int) -> None:
    fast, naive, now_s = queue(bound), NaiveQueue(bound), 0.0
    for what, tenant, priority, number in steps:
        now_s += 1.0
        if what == "push":
            new = request(tenant, priority, work=number, at_s=now_s)
            lost, should = fast.push(new), naive.push(new)
            if lost is None or lost is new:
                assert lost is should
            else:  # of equally long lines either may give one up
                assert should is not None
                assert should is not new
                assert lost.priority == should.priority
                counts = Counter((each.tenant, each.priority) for each in naive.waiting)
                assert counts[lost.tenant, lost.priority] == counts[should.tenant, should.priority]
                naive.waiting.remove(lost)
                naive.waiting.append(new)
        elif what == "leave" and naive.waiting:
            gone = naive.waiting.pop(number % len(naive.waiting))
            fast.remove(gone)
        elif naive.waiting:
            now_s += number
            assert fast.pop(now_s) is naive.pop(now_s)
        else:
            assert fast.pop(now_s) is None
        fast.check_integrity()
        assert len(fast) == len(naive.waiting) <= bound
        assert set(fast) == set(naive.waiting)


def test_only_those_for_whose_claim_there_is_room_are_taken() -> None:
    fair = queue()
    low, ordinary, high = request("a", Priority.LOW), request("b", at_s=9.0), request("c", Priority.HIGH, at_s=20.0)
    fair.push(low)
    fair.push(ordinary)
    assert fair.pop(9.0, (True, False, False)) is None
    assert fair.pop(10.0, (True, True, False)) is low, "it has risen, and came first"
    assert low.claim == 1
    assert fair.pop(10.0, (True, False, True)) is None
    fair.push(high)
    assert fair.pop(20.0, (False, True, True)) is None, "it has risen, and is no ordinary one any more"
    first, second = fair.pop(20.0, (True, False, False)), fair.pop(20.0, (True, False, False))
    assert {first, second} == {high, ordinary}
    assert (high.claim, ordinary.claim) == (0, 0)


def jain(shares: list[float]) -> float:
    return sum(shares) ** 2 / (len(shares) * sum(each**2 for each in shares))


@pytest.mark.parametrize("seed", range(5))
def test_shares_are_fair_in_every_window_in_which_all_wait(seed: int) -> None:
    """Tenants with requests of very different sizes and rates, all backlogged: equal work, whatever they send."""
    chance = random.Random(seed)  # noqa: S311 - not for secrets
    sizes = {f"t{number}": 10 ** chance.uniform(1, 3.5) for number in range(8)}
    fair = queue(10_000)

    def send(name: str) -> None:
        fair.push(request(name, work=sizes[name] * chance.uniform(0.5, 1.5)))

    for name in sizes:
        for _ in range(chance.randrange(1, 20)):
            send(name)
    window = 20 * max(sizes.values()) * len(sizes)  # so much work that one request is a small part of a share
    shares, windows = dict.fromkeys(sizes, 0.0), 0
    while windows < 5:
        taken = fair.pop(0.0)
        assert taken is not None
        send(taken.tenant)
        shares[taken.tenant] += taken.work
        if sum(shares.values()) >= window:
            assert jain(list(shares.values())) >= 0.95
            shares, windows = dict.fromkeys(sizes, 0.0), windows + 1


def test_weights_are_shares() -> None:
    fair, got = queue(), Counter[str]()
    for name, weight in (("small", 1.0), ("big", 3.0)):
        for _ in range(200):
            each = request(name)
            each.weight = weight
            fair.push(each)
    for _ in range(100):
        taken = fair.pop(0.0)
        assert taken is not None
        got[taken.tenant] += 1
    assert got == {"big": 75, "small": 25}


def test_who_comes_back_has_not_saved_up_a_claim() -> None:
    fair = queue()
    for _ in range(50):
        fair.push(request("busy"))
        fair.pop(0.0)
    for _ in range(20):
        fair.push(request("busy"))
        fair.push(request("new"))
    taken = [fair.pop(0.0) for _ in range(10)]
    assert Counter(each.tenant for each in taken if each is not None) == {"busy": 5, "new": 5}


def test_a_correction_is_felt_at_the_next_choice() -> None:
    fair = queue()
    for name in ("a", "b"):
        for _ in range(4):
            fair.push(request(name))
    first = fair.pop(0.0)
    assert first is not None
    fair.correct(first.tenant, 1.0, 2.0)  # it cost three times what it was taken for
    assert [each.tenant for each in (fair.pop(0.0) for _ in range(3)) if each] == ["b", "b", "b"]


def test_classes_go_before_shares_and_nobody_waits_for_ever() -> None:
    fair = queue()
    low = request("patient", Priority.LOW, at_s=0.0)
    fair.push(low)
    for second in range(100):
        fair.push(request("urgent", Priority.HIGH, at_s=float(second)))
        taken = fair.pop(float(second))
        if taken is low:
            assert second == 20
            return
        fair.push(request("urgent", Priority.HIGH, at_s=float(second)))
    pytest.fail("the patient one still waits")


def test_a_full_queue_gives_up_the_newest_of_the_longest_line_in_the_lowest_class() -> None:
    fair = queue(4)
    flood = [request("flood") for _ in range(4)]
    assert [fair.push(each) for each in flood] == [None] * 4
    own = request("flood")
    assert fair.push(own) is own
    assert fair.push(request("other")) is flood[3]
    assert fair.push(request("flood", Priority.HIGH)) is flood[2]
    worse = request("third", Priority.LOW)
    assert fair.push(worse) is worse
    assert len(fair) == 4


def test_a_queue_of_length_nought_takes_nobody() -> None:
    fair, one = queue(0), request("a")
    assert fair.push(one) is one


def test_many_tenants_are_remembered_within_bounds() -> None:
    fair = queue()
    for number in range(25_000):
        fair.let_in(TenantId(f"t{number}"), 1.0, 1.0)
    assert len(fair._counters) <= 10_000
