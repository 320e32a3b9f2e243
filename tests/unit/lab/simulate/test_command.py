"""``kvgate simulate`` and ``kvgate bench fleet`` say what came of a trace, and what they can't do."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvgate.app import build_app
from kvgate.failure import CommandError
from lab.simulate.outcome import FleetOutcome
from lab.simulate.study import Study
from tests.support.command import typed

RUNNER = CliRunner()


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    folder = tmp_path / "mooncake"
    folder.mkdir()
    lines = [
        {
            "timestamp": 500 * number,
            "input_length": 2048,
            "output_length": 20,
            "hash_ids": [0, *(10 * (number % 4) + place for place in range(1, 4))],
        }
        for number in range(24)
    ]
    with gzip.open(folder / "conversation_trace.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return tmp_path


def trace_of(traces: Path) -> str:
    return str(traces / "mooncake" / "conversation_trace.jsonl.gz")


def test_a_trace_is_served_by_each_router_that_is_named(traces: Path) -> None:
    said = RUNNER.invoke(
        build_app(),
        [
            "simulate",
            trace_of(traces),
            "--instances",
            "3",
            "--routing",
            "cost_aware,round_robin",
            "--ddr",
            "64GiB",
            "--json",
        ],
    )
    assert said.exit_code == 0, said.output
    report = json.loads(said.stdout)
    by_name = {row["router"]: row for row in report["routers"]}
    assert list(by_name) == ["cost_aware", "round_robin"]
    assert by_name["cost_aware"]["of_ceiling_ratio"] >= by_name["round_robin"]["of_ceiling_ratio"] > 0
    assert by_name["cost_aware"]["ttft_p50_s"] <= by_name["cost_aware"]["ttft_p99_s"]
    assert report["metrics"]["requests_count"] == 24


def test_users_who_wait_send_as_fast_as_they_are_answered(traces: Path) -> None:
    simulated = ["simulate", trace_of(traces), "--instances", "1", "--json", "--users"]
    one, four = (
        json.loads(RUNNER.invoke(build_app(), [*simulated, users, "--max-batch", "2"]).stdout)["routers"][0]
        for users in ("1", "4")
    )
    assert four["requests_per_s"] > 1.2 * one["requests_per_s"]
    assert four["ttft_p50_s"] > one["ttft_p50_s"]
    assert one["requests_by_instance"] == four["requests_by_instance"] == "24"
    assert one["of_ceiling_ratio"] == 1.0
    at_once, between = (
        json.loads(RUNNER.invoke(build_app(), [*simulated, "8", "--pace", pace]).stdout)["routers"][0]["itl_max_ms"]
        for pace in ("lmdeploy", "alternate")
    )
    assert at_once > between
    some = json.loads(RUNNER.invoke(build_app(), [*simulated, "1", "--duration", "1"]).stdout)
    assert 0 < some["metrics"]["requests_count"] < 24
    assert "don't use TTFT p99" in str(
        json.loads(RUNNER.invoke(build_app(), [*simulated, "1", "--profile", "h200-7b"]).stdout)["not_run"]
    )


def test_tables_are_printed_for_people(traces: Path) -> None:
    said = RUNNER.invoke(build_app(), ["simulate", trace_of(traces), "--limit", "8", "--markdown"])
    assert said.exit_code == 0, said.output
    assert "| cost_aware |" in said.stdout


def test_ctrl_c_leaves_the_routers_that_are_done(traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Study.run

    def until_the_second(study: Study, name: str, *more: Any) -> FleetOutcome:
        if name == "round_robin":
            raise KeyboardInterrupt
        return run(study, name, *more)

    monkeypatch.setattr(Study, "run", until_the_second)
    simulated = ("simulate", trace_of(traces), "--limit", "8", "--json", "--routing")
    said = typed(*simulated, "cost_aware,round_robin")
    assert (said.code, said.err) == (130, "kvgate: interrupted\n")
    report = json.loads(said.out)
    assert [row["router"] for row in report["routers"]] == ["cost_aware"]
    assert report["not_run"]["round_robin"] == "interrupted"
    assert typed(*simulated, "round_robin") == (130, "", "kvgate: interrupted\n")
    bench = ("bench", "fleet", "--quick", "--traces", str(traces), "--routing", "round_robin")
    said = typed(*bench)
    assert (said.code, said.out) == (130, "")
    assert said.err.endswith("kvgate: interrupted\n")


def test_the_fleet_bench_measures_time_and_memory(traces: Path) -> None:
    said = RUNNER.invoke(build_app(), ["bench", "fleet", "--quick", "--traces", str(traces), "--json"])
    assert said.exit_code == 0, said.output
    metrics = json.loads(said.stdout)["metrics"]
    assert metrics["requests_count"] == 8 * 24
    assert metrics["fleet_quick_s"] > 0
    assert metrics["fleet_peak_gb"] > 0


def test_studies_compare_fleets_of_one_run(traces: Path) -> None:
    (traces / "agentic").mkdir()
    with gzip.open(traces / "agentic" / "agentic_dev.jsonl.gz", "wt") as file:
        for turn in range(1, 9):
            file.write(json.dumps({"session": "one", "t": 9.0 * turn, "in": 64 * turn, "runs": [[0, turn]]}) + "\n")
    studied = ["bench", "fleet", "--quick", "--traces", str(traces), "--json", "--study"]
    said = RUNNER.invoke(build_app(), [*studied, "tiers"])
    assert said.exit_code == 0, said.output
    rows = json.loads(said.stdout)["tiers"]
    assert [(row["trace"], row["tiers"]) for row in rows] == [
        (trace, tiers) for trace in ("mooncake", "agentic") for tiers in ("HBM", "HBM + DDR", "HBM + DDR + NVMe")
    ]
    assert [row["computed_of_hbm_alone"] for row in rows if row["tiers"] == "HBM"] == [1.0, 1.0]
    said = RUNNER.invoke(build_app(), [*studied, "decisions"])
    assert said.exit_code == 0, said.output
    rows = json.loads(said.stdout)["decisions"]
    assert [(row["router"], row["instances"], row["requests"]) for row in rows] == [
        (router, instances, instances) for router in ("cost_aware", "round_robin") for instances in (8, 64)
    ]
    said = RUNNER.invoke(build_app(), [*studied, "magic"])
    assert "unknown study 'magic'; known: tiers, decisions" in str(said.exception)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--routing", "magic"], "unknown router 'magic'; known: cost_aware"),
        (["--profile", "magic"], "unknown profile 'magic'; known: "),
        (["--nvme", "64GiB"], "NVMe needs DDR"),
        (["--routing", ","], "no router is named"),
        (["--duration", "5"], "--duration is of --users"),
        (["--users", "2", "--speed", "3"], "--speed is of the trace's times"),
        (["--pace", "magic"], "unknown pace 'magic'; known: lmdeploy, alternate, itl_target"),
        (["--json", "--markdown"], "give one of them"),
        (["--ddr", "500TiB"], "--ddr 500TiB: at most "),
        (["--ddr", "inf"], "--ddr is 'inf'; expected an amount of memory"),
        (["--nvme", "-1"], "--nvme -1: at most "),
        (["--instances", "10000", "--ddr", "20TiB"], "at most 200,000,000 are simulated"),
        (["--copies", "10000"], "use --copies of at most 9"),
        (["--profile", "/dev/zero"], "/dev/zero: it is no profile: that is a regular file"),
    ],
)
def test_what_can_not_be_simulated_is_said(
    traces: Path, options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lab.simulate.workload.MOST_REQUESTS", 24 * 9)
    said = RUNNER.invoke(build_app(), ["simulate", trace_of(traces), *options])
    assert isinstance(said.exception, CommandError)
    assert message in str(said.exception)


@pytest.mark.parametrize(
    "options",
    [
        *(("simulate", "--speed", value) for value in ("inf", "nan", "1e15")),
        *(("simulate", name, "1000000000") for name in ("--copies", "--instances")),
        *(("plan", name, "inf") for name in ("--instance-cost", "--ddr-cost-per-gib", "--speed", "--check-seconds")),
        ("plan", "--max-instances", "1000000"),
        ("bench", "--instances", "1000000"),
    ],
)
def test_absurd_sizes_are_refused_with_what_is_allowed(traces: Path, options: tuple[str, str, str]) -> None:
    command, name, value = options
    before = ["bench", "fleet"] if command == "bench" else [command, trace_of(traces)]
    said = RUNNER.invoke(build_app(), [*before, name, value], env={"COLUMNS": "200"})
    assert said.exit_code == 2
    assert f"'{name}'" in said.stderr
    assert "should be less than or equal to" in " ".join(said.stderr.split())


def test_where_nobody_is_served_there_is_no_time_to_the_first_token(tmp_path: Path) -> None:
    trace = tmp_path / "long.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 512 * 400, "hash_ids": list(range(400))}) + "\n")
    said = RUNNER.invoke(build_app(), ["simulate", str(trace), "--json"])
    (row,) = json.loads(said.stdout)["routers"]
    assert {row[name] for name in row if name.startswith(("ttft", "itl"))} == {None}
    assert (row["shed_ratio"], row["refused_ratio"]) == (0.0, 1.0)
    said = RUNNER.invoke(build_app(), ["simulate", str(trace), "--markdown"])
    assert "| cost_aware | - | - | - | - | - |" in said.stdout
    said = RUNNER.invoke(build_app(), ["plan", str(trace), "--slo", "itl=1s", "--ddr", "0", "--max-instances", "2"])
    assert said.exit_code == 1
    assert "no engine could take any of the requests" in " ".join(said.stderr.split())


def test_a_trace_of_lengths_alone_is_simulated_without_hits(tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:15:{second:02},{900 + second},40" for second in range(30)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    said = RUNNER.invoke(build_app(), ["simulate", str(trace), "--instances", "2", "--ddr", "16GiB", "--json"])
    assert said.exit_code == 0, said.output
    report = json.loads(said.stdout)
    (row,) = report["routers"]
    assert (row["hit_ratio"], row["refused_ratio"]) == (0.0, 0.0)
    assert 0 < row["ttft_p50_s"] < 1
    assert "lengths alone" in report["not_run"]["hit_ratio"]


def test_prompts_of_no_tokens_and_gaps_of_years_are_simulated(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    empty = {"timestamp": 0, "input_length": 0, "output_length": 0, "hash_ids": []}
    trace.write_text("".join(json.dumps(empty | {"timestamp": at}) + "\n" for at in (0, 3e12)))
    said = RUNNER.invoke(build_app(), ["simulate", str(trace), "--json"])
    assert said.exit_code == 0, said.output
    metrics = json.loads(said.stdout)["metrics"]
    assert (metrics["requests_count"], metrics["ceiling_ratio"]) == (2, 0.0)


def test_users_leave_out_requests_that_no_engine_takes_and_the_report_counts_them(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    short = {"timestamp": 0, "input_length": 1_000, "output_length": 5, "hash_ids": [1, 2]}
    long = {"timestamp": 1, "input_length": 204_800, "output_length": 5, "hash_ids": list(range(400))}
    trace.write_text("".join(json.dumps(each) + "\n" for each in (short, long, long)))
    said = RUNNER.invoke(build_app(), ["simulate", str(trace), "--instances", "1", "--users", "1", "--json"])
    report = json.loads(said.stdout)
    assert report["metrics"]["requests_count"] == 1
    assert report["not_run"]["2 requests"] == "they are longer than an engine takes, and are left out"
    trace.write_text(json.dumps(long) + "\n")
    said = RUNNER.invoke(build_app(), ["simulate", str(trace), "--instances", "1", "--users", "1"])
    assert "trace.jsonl has more" in str(said.exception)


def test_the_limits_of_a_profile_are_those_of_its_own_pace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}) + "\n")
    asked = ["simulate", str(trace), "--instances", "1", "--profile", "h200-7b", "--json"]
    own, other = (
        json.loads(RUNNER.invoke(build_app(), [*asked, *pace]).stdout)["not_run"]["limits of h200-7b"]
        for pace in ([], ["--pace", "alternate"])
    )
    assert own.startswith("one run of six users")
    assert other.startswith("of its own pace ")
    assert "none of it is known of alternate" in other


def test_a_file_that_is_no_trace_is_said(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("{}")
    said = RUNNER.invoke(build_app(), ["simulate", str(tmp_path / "x")])
    assert "neither hash_ids" in str(said.exception)
    (tmp_path / "azure.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    said = RUNNER.invoke(build_app(), ["simulate", str(tmp_path / "azure.csv")])
    assert "azure.csv has no request" in str(said.exception)
    said = RUNNER.invoke(build_app(), ["bench", "fleet", "--traces", str(tmp_path)])
    assert "there is no trace" in str(said.exception)
