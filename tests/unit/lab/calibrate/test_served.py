"""What a served run shows of an engine is found again in a simulated one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engines.sim.profile import load_profile
from engines.sim.timing import TimeModel
from lab.bench.served.run import small_trace
from lab.calibrate.served import COEFFICIENTS, figures_of, fit_served, main, read_figures
from lab.simulate.outcome import FleetOutcome
from lab.simulate.study import Study


def test_a_front_is_found_again_by_the_run_that_it_made(tmp_path: Path) -> None:
    profile = load_profile("h200-7b")
    study = Study(
        trace=small_trace(tmp_path), profile=profile, instances=1, routers=("cost_aware",), users=3, kv_blocks=200
    )
    workload = study.workload()

    def run(time: TimeModel) -> FleetOutcome:
        return replace(study, profile=replace(profile, time=time)).run("cost_aware", workload)

    measured = figures_of(run(replace(profile.time, front_s=0.16)))
    found = fit_served(profile.time, measured, run)
    assert found.front_s == pytest.approx(0.16, rel=0.3)
    seen = figures_of(run(found))
    assert {name: seen[name] for name in ("ttft_mean_ms", "requests_per_s")} == pytest.approx(
        {name: measured[name] for name in ("ttft_mean_ms", "requests_per_s")}, rel=0.05
    )


def test_a_report_of_served_runs_is_read_and_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    rows = [
        {"figure": "requests_per_s", "ours": 9.0, "vllm": 1.0},
        {"figure": "ttft_mean_ms", "ours": 90.0, "vllm": 1.0},
    ]
    report.write_text(json.dumps({"bench": "served", "metrics": {}, "3 users, small": rows}))
    assert read_figures(report, "ours") == {"requests_per_s": 9.0, "ttft_mean_ms": 90.0}
    trace = str(small_trace(tmp_path))
    assert main([str(report), trace, "--profile", "h200-7b", "--users", "2", "--ddr", "1GiB"]) == 0
    said = capsys.readouterr().out
    assert all(f"{name} = " in said for name in COEFFICIENTS)
    assert "# ttft_mean_ms: simulated " in said
    assert "measured 90, " in said


@pytest.mark.parametrize(
    ("text", "why"),
    [('{"metrics": {}}', "no table of figures with 'ours'"), ("[]", "no table"), ("x", "Expecting value")],
)
def test_what_is_no_report_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, why: str) -> None:
    report = tmp_path / "report.json"
    report.write_text(text)
    assert main([str(report), str(small_trace(tmp_path)), "--profile", "h200-7b"]) == 2
    assert why in capsys.readouterr().err
