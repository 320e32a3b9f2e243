"""Goals are read as they are typed, and judged by all requests that an engine could have taken."""

from array import array
from math import inf

import pytest

from engines.sim.gaps import GapHistogram
from lab.driver.answer import Answer, Ending
from lab.plan.slo import Slo
from lab.plan.verdict import goals_grid
from lab.simulate.outcome import FleetOutcome, Tally


def outcome(*ttft_s: float, shed: int = 0, refused: int = 0, gap_s: float = 0.01) -> FleetOutcome:
    gaps = GapHistogram()
    gaps.add(gap_s, 100)
    return FleetOutcome(
        policy="p",
        instances=1,
        requests=len(ttft_s) + shed + refused,
        shed=shed,
        refused=refused,
        ttft_s=sorted(ttft_s),
        answer_s=sorted(ttft_s),
        prompt_tokens=1,
        found_by_tier={},
        ceiling_tokens=1,
        hotspot=1.0,
        busy=0.5,
        lasts_s=1.0,
        preemptions=0,
        gaps=gaps,
        decision_us=0.0,
        computed_tokens=1,
    )


def test_goals_are_read_in_seconds_and_milliseconds() -> None:
    slo = Slo.parse(" ttft_p99=2s, itl_p99.9=50ms,ttft=1.5s ", 0.95)
    assert [(each.name, each.limit_s) for each in slo.goals] == [
        ("ttft_p99", 2.0),
        ("itl_p99.9", 0.05),
        ("ttft_p95", 1.5),
    ]
    assert str(slo) == "ttft_p99=2s,itl_p99.9=50ms,ttft_p95=1.5s,answered=0.95"


@pytest.mark.parametrize(
    ("text", "attainment", "message"),
    [
        ("", 0.99, "names no goal"),
        ("e2e_p99=2s", 0.99, "'e2e_p99=2s' is no goal; there are ttft and itl"),
        ("ttft_p99=2", 0.99, "is no goal"),
        ("ttft_p101=2s", 0.99, "a percentile is above 0"),
        ("ttft_p99=0s", 0.99, "a limit above 0"),
        ("ttft_p99=1s,ttft=2s", 0.99, "ttft_p99 is there twice"),
        ("ttft=1s", 1.5, "--attainment is 1.5"),
    ],
)
def test_what_is_no_goal_is_said(text: str, attainment: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Slo.parse(text, attainment)


def test_goals_that_are_kept_have_no_shortfall() -> None:
    assert Slo.parse("ttft_p50=1s,itl=20ms", 0.99).shortfalls(outcome(0.5, 1.0, 3.0, gap_s=0.01)) == ()


def test_what_is_missed_most_comes_first() -> None:
    missed = Slo.parse("ttft_p100=1s,itl=20ms", 0.5).shortfalls(outcome(0.5, 4.0, gap_s=0.03))
    assert [each.goal for each in missed] == ["ttft_p100", "itl_p50"]
    assert missed[0].factor == 4.0
    assert missed[0].words == "ttft_p100 is 4s, 1s is allowed"


def test_who_was_turned_away_waited_for_ever_and_who_no_engine_takes_does_not_count() -> None:
    slo = Slo.parse("ttft_p75=1s", 0.5)
    assert slo.shortfalls(outcome(0.5, 0.5, 0.5, shed=1, refused=9)) == ()
    (missed,) = slo.shortfalls(outcome(0.5, 0.5, shed=2))
    assert (missed.goal, missed.factor) == ("ttft_p75", inf)
    assert "is never" in missed.words


def test_too_few_answers_are_a_shortfall() -> None:
    (missed,) = Slo.parse("ttft_p50=9s", 0.9).shortfalls(outcome(*[1.0] * 8, shed=2))
    assert missed.words == "80.00% of the requests are answered, 90.00% are to be"


@pytest.mark.parametrize(
    ("ttft_s", "failed", "met", "seen"),
    [
        ([0.5, 0.9], 0, {"ttft_p90_s": "yes", "itl_p50_s": "yes", "answered_ratio": "yes"}, 0.9),
        ([0.5, 1.5], 0, {"ttft_p90_s": "no", "itl_p50_s": "yes", "answered_ratio": "yes"}, 1.5),
        ([0.5, 0.9], 2, {"ttft_p90_s": "no", "itl_p50_s": "yes", "answered_ratio": "no"}, None),
        ([], 2, {"ttft_p90_s": "no", "itl_p50_s": "no", "answered_ratio": "no"}, None),
    ],
)
def test_a_live_run_is_judged_by_the_goals(
    ttft_s: list[float], failed: int, met: dict[str, str], seen: float | None
) -> None:
    answers = [
        Answer(number=0, due_s=0.0, first_s=each, gaps_s=array("f", [0.01, 0.01]), ending=Ending.OK) for each in ttft_s
    ]
    answers += [Answer(number=0, due_s=0.0, ending=Ending.FAILED)] * failed
    rows = goals_grid(Slo.parse("ttft_p90=1s,itl_p50=50ms", 0.9), outcome(0.5), answers).as_objects()
    assert {row["goal"]: row["met"] for row in rows} == met
    assert rows[0]["live"] == seen
    assert rows[0]["predicted"] == 0.5


def test_a_fleet_is_given_up_as_soon_as_a_goal_is_missed_for_certain() -> None:
    hopeless = Slo.parse("ttft_p90=1s", 0.5).hopeless(requests=20)
    tally = Tally()
    for late in range(3):
        assert not hopeless(tally), late
        tally.ttft_s += [2.0, 0.1]
    assert hopeless(tally)
    crowded = Slo.parse("itl=1s", 0.9).hopeless(requests=20)
    tally.shed = 2
    assert not crowded(tally)
    tally.shed = 3
    assert crowded(tally)
