"""The rule swaps on a lead that holds, swaps back when that was wrong, and leaves operators' choices alone."""

from gateway.fleet.auto_rule import HOLD_PERIODS, AutoRule, Decision
from gateway.fleet.evidence import LEAST_PERIODS, Counted, ShadowEvidence
from kvcontrol.core.ids import InstanceId

DWELL_S = 100.0
PROVEN = LEAST_PERIODS + HOLD_PERIODS


class Watched:
    """One engine, its candidates, and the rule that follows them: a period a second."""

    def __init__(self) -> None:
        self.evidence, self.rule = ShadowEvidence(), AutoRule(dwell_s=DWELL_S)
        self.now_s = 0.0
        self.in_charge = "lru"
        self.counted = {"lru": Counted(0, 0), "mq": Counted(0, 0)}
        self.evidence.observe(0.0, {InstanceId("a"): dict(self.counted)})

    def period(self, *, lru: int, mq: int) -> Decision | None:
        self.now_s += 1
        for name, hits in (("lru", lru), ("mq", mq)):
            before = self.counted[name]
            self.counted[name] = Counted(before.lookups + 100, before.hits + hits)
        self.evidence.observe(self.now_s, {InstanceId("a"): dict(self.counted)})
        decision = self.rule.decide(self.now_s, self.in_charge, self.evidence)
        if decision is not None:
            self.rule.swapped(self.now_s, decision)
            self.in_charge = decision.policy
        return decision

    def periods(self, count: int, *, lru: int, mq: int) -> list[Decision]:
        return [each for _ in range(count) if (each := self.period(lru=lru, mq=mq)) is not None]


def test_a_lead_that_holds_is_followed_once_the_dwell_time_is_over() -> None:
    watched = Watched()
    assert watched.periods(int(DWELL_S), lru=20, mq=30) == []
    (decision,) = watched.periods(2, lru=20, mq=30)
    assert (decision.policy, decision.instead_of, decision.undo) == ("mq", "lru", False)
    assert decision.reason.startswith("mq found +10.0% of look-ups more than lru (noise 0.00%) as a shadow policy, in ")
    assert watched.periods(3 * int(DWELL_S), lru=20, mq=30) == []


def test_no_lead_no_swap() -> None:
    watched = Watched()
    assert watched.periods(3 * int(DWELL_S), lru=20, mq=20) == []


def test_a_lead_must_hold() -> None:
    watched = Watched()
    watched.periods(int(DWELL_S) + 5, lru=20, mq=20)
    for _ in range(4):  # a lead of moments, lost again each time
        assert watched.periods(HOLD_PERIODS // 2, lru=20, mq=26) == []
        assert watched.periods(HOLD_PERIODS // 2, lru=26, mq=20) == []


def test_a_swap_that_was_wrong_is_undone_and_not_made_again_for_long() -> None:
    watched = Watched()
    watched.periods(int(DWELL_S) + 2, lru=20, mq=30)
    assert watched.in_charge == "mq"
    (undo,) = watched.periods(PROVEN, lru=40, mq=20)
    assert (undo.policy, undo.instead_of, undo.undo) == ("lru", "mq", True)
    assert "since the swap" in undo.reason
    assert watched.periods(5 * int(DWELL_S), lru=20, mq=30) == []


def test_after_its_probation_a_policy_is_swapped_like_any_other() -> None:
    watched = Watched()
    watched.periods(int(DWELL_S) + 2, lru=20, mq=30)
    watched.periods(int(DWELL_S), lru=20, mq=30)
    decisions = watched.periods(200, lru=40, mq=20)
    assert [(each.policy, each.undo) for each in decisions] == [("lru", False)]


def test_a_swap_that_was_refused_is_not_tried_again_within_the_dwell_time() -> None:
    watched = Watched()
    watched.periods(int(DWELL_S), lru=20, mq=30)
    watched.rule.refused(watched.now_s)
    assert watched.periods(int(DWELL_S) - 1, lru=20, mq=30) == []
    assert [each.policy for each in watched.periods(2, lru=20, mq=30)] == ["mq"]


def test_what_an_operator_puts_in_charge_is_left_alone_for_the_dwell_time() -> None:
    watched = Watched()
    watched.periods(int(DWELL_S) - 1, lru=20, mq=30)
    watched.in_charge = "mq"
    watched.period(lru=20, mq=30)
    watched.in_charge = "lru"
    assert watched.periods(int(DWELL_S), lru=20, mq=30) == []
    assert [each.policy for each in watched.periods(2, lru=20, mq=30)] == ["mq"]
