"""A candidate is ahead only by more than the noise of periods, and by enough to matter."""

from random import Random

import pytest

from gateway.fleet.evidence import LEAST_PERIODS, MOST_PERIODS, Counted, ShadowEvidence, Verdict
from kvcontrol.core.ids import InstanceId

A, B = InstanceId("a"), InstanceId("b")


class Engine:
    """Counters that grow."""

    def __init__(self, *names: str) -> None:
        self.counted = dict.fromkeys(names, Counted(0, 0))

    def served(self, lookups: int, **hits: int) -> dict[str, Counted]:
        for name, found in hits.items():
            before = self.counted[name]
            self.counted[name] = Counted(before.lookups + lookups, before.hits + found)
        return dict(self.counted)


def verdict(evidence: ShadowEvidence, name: str, over: str = "lru") -> Verdict:
    return next(each.verdict for each in evidence.leads(over) if each.policy == name)


def test_a_steady_lead_is_proven_after_some_periods_and_a_tie_before() -> None:
    evidence, engine = ShadowEvidence(), Engine("lru", "mq")
    evidence.observe(0, {A: engine.served(0, lru=0, mq=0)})
    for period in range(1, LEAST_PERIODS + 1):
        evidence.observe(period, {A: engine.served(100, lru=20, mq=24)})
        assert verdict(evidence, "mq") is (Verdict.AHEAD if period >= LEAST_PERIODS else Verdict.TIE)
    assert verdict(evidence, "lru", over="mq") is Verdict.BEHIND
    (lead,) = evidence.leads("lru")
    assert lead.lead == pytest.approx(0.04)
    assert lead.periods == LEAST_PERIODS


def test_a_lead_that_one_period_made_is_a_tie() -> None:
    evidence, engine = ShadowEvidence(), Engine("lru", "mq")
    for period in range(30):
        evidence.observe(period, {A: engine.served(100, lru=20, mq=95 if period == 7 else 20)})
    assert verdict(evidence, "mq") is Verdict.TIE


def test_a_lead_too_small_to_matter_is_a_tie() -> None:
    evidence, engine = ShadowEvidence(), Engine("lru", "mq")
    for period in range(30):
        evidence.observe(period, {A: engine.served(1_000, lru=200, mq=205)})
    assert verdict(evidence, "mq") is Verdict.TIE


def test_policies_that_find_alike_are_hardly_ever_told_apart() -> None:
    proven = 0
    for seed in range(60):
        rng = Random(seed)  # noqa: S311 - reproducible, not secret
        evidence, engine = ShadowEvidence(), Engine("lru", "mq")
        for period in range(MOST_PERIODS):
            evidence.observe(period, {A: engine.served(100, lru=rng.randrange(60), mq=rng.randrange(60))})
        proven += verdict(evidence, "mq") is not Verdict.TIE
    assert proven <= 1


def test_periods_are_sums_over_the_fleet_and_an_instance_that_began_anew_is_left_out() -> None:
    evidence, first, second = ShadowEvidence(), Engine("lru", "mq"), Engine("lru", "mq")
    evidence.observe(0, {A: first.served(100, lru=90, mq=90), B: second.served(100, lru=50, mq=50)})
    evidence.observe(1, {A: first.served(100, lru=10, mq=30), B: second.served(300, lru=10, mq=10)})
    assert evidence.leads("lru")[0].lead == pytest.approx(20 / 400)
    again = Engine("lru", "mq")
    evidence.observe(2, {A: again.served(50, lru=0, mq=50), B: second.served(100, lru=10, mq=10)})
    assert evidence.leads("lru")[0].lead == pytest.approx(20 / 500)
    evidence.observe(3, {A: Engine("lru", "arc").served(900, lru=0, arc=0)})
    assert evidence.leads("lru")[0].periods == 2


def test_only_periods_since_a_time_count_where_that_is_asked() -> None:
    evidence, engine = ShadowEvidence(), Engine("lru", "mq")
    for period in range(20):
        evidence.observe(period, {A: engine.served(100, lru=20, mq=30 if period < 10 else 10)})
    (lead,) = evidence.leads("lru", since_s=9)
    assert lead.lead == pytest.approx(-0.1)
    assert lead.periods == 10
