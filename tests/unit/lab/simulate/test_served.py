"""Closed loops in virtual time: users who wait for their answers, and what served runs on a card came to."""

from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from engines.sim.profile import load_profile
from kvcontrol.core.blocks import CacheIdentity
from lab.simulate.arrivals import NEVER, ClosedLoop
from lab.simulate.outcome import FleetOutcome
from lab.simulate.study import Study
from lab.simulate.workload import Workload
from lab.traces import AGENTIC, Request

TRACES = Path(__file__).parents[5] / "shared" / "traces"
IDENTITY = CacheIdentity(model="m", revision="r", kv_dtype="f", block_size_tokens=64)


def turn(session: str, at_s: float) -> Request:
    return Request(
        block_ids=array("q", [1]), block_tokens=64, prompt_tokens=70, at_s=at_s, output_tokens=2, session=session
    )


def test_a_user_sends_the_next_request_of_a_session_when_the_one_before_is_over() -> None:
    requests = [turn("a", 0.0), turn("b", 1.0), turn("a", 2.0), turn("c", 3.0)]
    loop = ClosedLoop(Workload(requests=requests), IDENTITY, users=2, duration_s=100.0)
    first, second = loop.pop(), loop.pop()
    assert [(each.number, each.at_s) for each in (first, second)] == [(0, 0.0), (1, 0.0)]
    assert loop.next_s == NEVER
    loop.over(second, 7.0)
    third = loop.pop()
    assert (third.number, third.at_s) == (3, 7.0)
    loop.over(first, 8.0)
    fourth = loop.pop()
    assert (fourth.number, fourth.at_s) == (2, 8.0)
    for each in (third, fourth):
        loop.over(each, 9.0)
    assert loop.next_s == NEVER


def test_nobody_sends_after_the_duration() -> None:
    loop = ClosedLoop(Workload(requests=[turn("a", 0.0), turn("a", 1.0)]), IDENTITY, users=1, duration_s=5.0)
    loop.over(loop.pop(), 5.0)
    assert loop.next_s == NEVER


def served(profile: str, *, pace: str = "", ddr: float, duration_s: float) -> FleetOutcome:
    found = load_profile(profile)
    if pace:
        found = replace(found, engine=replace(found.engine, pace=pace))
    study = Study(
        trace=TRACES / AGENTIC,
        profile=found,
        instances=1,
        routers=("cost_aware",),
        limit=400,
        ddr=ddr,
        users=6,
        duration=duration_s,
        kv_blocks=6000,
        policy="adaptive",
    )
    return study.run("cost_aware", study.workload())


@pytest.mark.skipif(not (TRACES / AGENTIC).is_file(), reason="the traces are not beside this checkout")
@pytest.mark.parametrize(
    ("pace", "measured"),
    [
        ("", {"requests_per_s": 1.14, "ttft_mean_s": 1.534, "ttft_p50_s": 0.336, "tpot_mean_ms": 13.0, "itl_ms": 9.1}),
        ("alternate", {"requests_per_s": 74 / 70, "ttft_mean_s": 1.137, "tpot_mean_ms": 15.4}),
        ("itl_target(overlapped_tokens=0)", {"requests_per_s": 68 / 70, "tpot_mean_ms": 17.2}),
    ],
)
def test_a_served_run_of_six_users_on_a_card_is_met(pace: str, measured: dict[str, float]) -> None:
    """The figures of ``docs/performance/serving.md``: one H200, 6,000 blocks, 40 GiB of DDR, 75 s."""
    outcome = served("h200-7b", pace=pace, ddr=1.95, duration_s=75.0)
    seen = {
        "requests_per_s": outcome.requests_per_s,
        "ttft_mean_s": outcome.ttft_mean_s,
        "ttft_p50_s": outcome.ttft(0.5),
        "tpot_mean_ms": outcome.tpot_mean_ms,
        "itl_ms": outcome.itl_ms(0.5),
    }
    assert {name: seen[name] for name in measured} == pytest.approx(measured, rel=0.15)
    assert outcome.of_ceiling > 0.97
    assert outcome.requests == len(outcome.served) < 120


@pytest.mark.skipif(not (TRACES / AGENTIC).is_file(), reason="the traces are not beside this checkout")
def test_a_served_run_by_lmdeploys_rule_is_met_where_its_profile_is_to_be_used() -> None:
    """Other sessions of the kind: 0.95 requests a second, TTFT p50 0.79 s, TPOT 19.7 ms after 90 s."""
    outcome = served("h200-7b-lmdeploy", ddr=2.93, duration_s=90.0)
    assert outcome.requests_per_s == pytest.approx(0.95, rel=0.15)
    assert outcome.ttft(0.5) == pytest.approx(0.79, rel=0.15)
    assert outcome.tpot_mean_ms == pytest.approx(19.7, rel=0.15)
