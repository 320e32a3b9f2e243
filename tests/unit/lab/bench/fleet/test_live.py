"""What ``kvgate bench live`` serves of a trace, and what it makes of what it saw."""

import json
from array import array
from pathlib import Path

import pytest

from engines.sim.profile import load_profile
from kvgate.failure import CommandError
from lab.bench.fleet.live import LivePlan, conversations, slice_of
from lab.driver.answer import Answer, Ending
from lab.driver.run import Replayed
from lab.driver.summary import Setting, summarize
from lab.simulate.board import FleetBoard
from lab.simulate.busy import Busy
from lab.simulate.live import Lived, Slice, predicted
from lab.simulate.study import Study
from lab.traces import Request
from tests.support.command import Said, typed

OPTIONS = ("--instances", "2", "--of", "4", "--every", "2", "--stretch", "5")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Conversations of two turns; one request is longer than any engine's context."""
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        for number in range(12):
            ids = [0, 1 + number // 2, 100 + number]
            length = 1500
            if number == 5:
                ids, length = [*ids, *range(1000, 2951)], 10**6
            line = {"timestamp": 1000 * number, "input_length": length, "output_length": 4, "hash_ids": ids}
            file.write(json.dumps(line) + "\n")
    return path


def request(*ids: int, session: str = "") -> Request:
    return Request(block_ids=array("q", ids), block_tokens=512, prompt_tokens=512, at_s=0.0, session=session)


def test_every_so_many_th_conversation_is_taken_whole() -> None:
    chats = [request(0, 1), request(0, 2), request(0, 1, 3), request(0), request(0, 2, 4), request(0, 5)]
    assert [list(each.block_ids) for each in conversations(chats, 2)] == [[0, 1], [0, 1, 3], [0]]
    assert list(conversations(chats, 1)) == chats
    named = [request(1, session="a"), request(1, session="b"), request(7, session="a")]
    assert list(conversations(named, 2)) == [named[0], named[2]]


def plan(trace: Path, *, requests: int) -> tuple[LivePlan, Study]:
    made = LivePlan(
        trace=trace, profile="h100-7b", router="cost_aware", instances=2, of=4, every=2, requests=requests, stretch=5
    )
    return made, Study(trace=trace, profile=load_profile("h100-7b"), instances=2, routers=("cost_aware",), slow=5)


def test_the_slice_has_the_rate_of_its_part_of_the_fleet_and_all_its_times_are_stretched(trace: Path) -> None:
    part = slice_of(*plan(trace, requests=4))
    assert [each.at_s for each in part.requests] == [0.0, 1.0, 4.0, 8.0], "what no engine takes is left out"
    assert part.speed == pytest.approx(2 * (2 / 4) / 5)
    assert part.seconds == pytest.approx(40.0)
    assert str(part) == "2 of 4 instances, 4 requests in 40 s"


def test_engines_are_as_slow_as_the_study_says(trace: Path) -> None:
    made, study = plan(trace, requests=1)
    outcome = predicted(study, "cost_aware", slice_of(made, study), FleetBoard())
    alone_s = study.profile.time.prompt_s(1500, 0, study.profile.engine.max_prefill_tokens)
    assert outcome.ttft(0.5) == pytest.approx(5 * alone_s)


def said_of(trace: Path, monkeypatch: pytest.MonkeyPatch, *options: str, later: float, stopped: bool = False) -> Said:
    """Run the command on a live run whose first tokens came so many times later than they were predicted."""

    def seen(study: Study, router: str, part: Slice, *_: object) -> Lived:
        outcome = predicted(study, router, part, FleetBoard())
        answers = [
            Answer(
                number=number,
                due_s=0.0,
                first_s=ttft_s * later,
                ending=Ending.OK,
                prompt_tokens=outcome.prompt_tokens if number == 0 else 0,
                cached_tokens=outcome.found_tokens if number == 0 else 0,
            )
            for number, ttft_s in enumerate(outcome.ttft_s)
        ]
        setting = Setting(
            how="", block_tokens=512, elapsed_s=1.0, planned=0, left_out=0, open_loop=True, driver_cpu_s=0.0
        )
        report = summarize(answers, setting)
        return Lived(
            replayed=Replayed(report=report, answers=answers, setting=setting, interrupted=stopped),
            at_engines_s=1.0,
            busy=Busy(gateway=0.1, engines=0.2, client=0.05, others=1.5),
        )

    monkeypatch.setattr("lab.bench.fleet.live.lived", seen)
    return typed("bench", "live", "--trace", str(trace), *OPTIONS, *options)


def test_both_sides_stand_beside_each_other_with_their_difference_in_percent(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = said_of(trace, monkeypatch, "--json", later=1.25)
    assert said.code == 0
    report = json.loads(said.out)
    assert report["metrics"]["worst_difference_pct"] == pytest.approx(20)
    rows = {row["figure"]: row for row in report["2 of 4 instances, 5 requests in 45 s, all times x 5"]}
    assert rows["ttft_p99_s"]["difference_pct"] == pytest.approx(-20, abs=0.1)
    assert rows["ttft_p99_s"]["live"] == pytest.approx(1.25 * rows["ttft_p99_s"]["simulated"], rel=1e-3)
    assert (rows["hit_ratio"]["difference_pct"], rows["answered_requests"]["live"]) == (0.0, 5)
    assert report["processor time meanwhile"][3] == {"whose": "others': what disturbs", "core_pct": 150.0}


def test_a_check_fails_by_what_differs_and_the_report_is_printed_all_the_same(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = said_of(trace, monkeypatch, "--check", "--markdown", later=1.25)
    assert said.code == 1
    assert "| ttft_p90_s | " in said.out
    assert "differ by more than 5 %: ttft_mean_s by -20.0 %, ttft_p50_s by -20.0 %" in said.err
    assert "hit_ratio" not in said.err
    assert said_of(trace, monkeypatch, "--check", later=1.04).code == 0


def test_a_live_run_that_was_interrupted_is_no_result(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = said_of(trace, monkeypatch, "--json", later=1.0, stopped=True)
    assert (said.code, said.out) == (130, "")


def test_what_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    said = typed("bench", "live", "--trace", str(tmp_path / "none"))
    assert said.code == 1
    assert "there is no trace" in said.err
    assert "name its file with --trace" in said.err
    assert "--instances 3 is more than --of 2" in typed("bench", "live", "--instances", "3", "--of", "2").err
    path = tmp_path / "long.jsonl"
    line = {"timestamp": 0, "input_length": 10**6, "output_length": 1, "hash_ids": list(range(1954))}
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(CommandError, match="no request of the trace fits"):
        slice_of(*plan(path, requests=4))
