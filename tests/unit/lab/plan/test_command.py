"""``kvgate plan`` finds the smallest fleet of each kind, the cheapest of them, and says what came nearest otherwise."""

import gzip
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from engines.sim.profile import FOLDER
from kvgate.app import build_app
from kvgate.failure import CommandError
from lab.plan.sizing import GIB, kinds
from tests.support.command import typed

RUNNER = CliRunner()


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Eight chats of five turns, a request every tenth of a second."""
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wt") as file:
        for number in range(40):
            chat, turn = number % 8, number // 8
            ids = [0, *(100 * chat + place for place in range(1, 4 * (turn + 1)))]
            line = {"timestamp": 100 * number, "input_length": 512 * len(ids), "output_length": 30, "hash_ids": ids}
            file.write(json.dumps(line) + "\n")
    return str(path)


def planned(trace: str, *options: str) -> Result:
    return RUNNER.invoke(build_app(), ["plan", trace, *options])


def report(trace: str, *options: str) -> dict[str, Any]:
    said = planned(trace, *options, "--json")
    assert said.exit_code == 0, said.output
    read: dict[str, Any] = json.loads(said.stdout)
    return read


def test_the_smallest_fleet_is_found_and_one_instance_less_is_not_enough(trace: str) -> None:
    goal = ("--slo", "ttft_p90=150ms", "--ddr", "0")
    found = report(trace, *goal)
    count = int(found["metrics"]["instances_count"])
    assert count > 1
    assert found["metrics"]["usd_per_hour"] == 2.5 * count
    assert found["frontier"][0]["instances"] == count
    short = planned(trace, *goal, "--max-instances", str(count - 1), "--json")
    assert short.exit_code == 1
    assert f"no fleet of up to {count - 1} instances keeps ttft_p90=150ms" in short.stderr
    assert f"nearest came {count - 1} x (HBM, adaptive, cost_aware): ttft_p90 is" in " ".join(short.stderr.split())
    rows = json.loads(short.stdout)["smallest fleets"]
    assert [row["note"].startswith("misses: ttft_p90 is ") for row in rows] == [True]


def test_a_goal_that_no_number_of_instances_keeps_is_said_to_be_such(trace: str) -> None:
    said = planned(trace, "--slo", "ttft_p50=1ms", "--ddr", "0", "--max-instances", "9")
    assert said.exit_code == 1
    assert "1ms is allowed" in said.stderr
    assert "it is not their number that binds" in said.stderr


def test_the_same_plan_comes_out_again_to_the_last_digit(trace: str) -> None:
    goal = ("--slo", "ttft_p90=400ms,itl=1s", "--jitter", "0.2", "--seed", "3", "--routing", "cost_aware,round_robin")
    once, again = report(trace, *goal), report(trace, *goal)
    for said in (once, again):
        del said["host"]
    assert once == again


def test_the_batch_of_an_instance_is_chosen_and_part_of_what_is_to_be_run(trace: str) -> None:
    goal = ("--slo", "ttft_p90=2s", "--ddr", "0", "--seeds", "0")
    one, many = (report(trace, *goal, "--max-batch", batch) for batch in ("1", "16"))
    assert one["metrics"]["instances_count"] > many["metrics"]["instances_count"]
    lines = {each["what"]: each["command"] for each in one["to run it"]}
    assert "--max-batch-size 1" in lines["on one machine"]
    assert lines["in virtual time"].endswith("--max-batch 1")


def test_every_kind_is_sized_and_what_an_instance_has_costs(trace: str) -> None:
    found = report(
        trace,
        *("--slo", "ttft_p99=30s", "--ddr", "0,1GiB", "--nvme", "0,4GiB", "--policy", "lru,adaptive"),
        *("--instance-cost", "1", "--ddr-cost-per-gib", "0.5", "--nvme-cost-per-gib", "0.25"),
    )
    rows = found["smallest fleets"]
    seen = {(row["ddr_gib"], row["nvme_gib"], row["policy"]): row["usd_per_hour"] for row in rows}
    assert seen == {
        (ddr, nvme, policy): 1 + 0.5 * ddr + 0.25 * nvme
        for ddr, nvme in ((0, 0), (1, 0), (1, 4))
        for policy in ("lru", "adaptive")
    }
    assert found["metrics"]["usd_per_hour"] == 1
    assumed = {each["what"]: each["value"] for each in found["assumed"]}
    assert list(assumed) == ["load", "engines", "prices"]
    assert assumed["load"].startswith("ttft_p99=30s,answered=0.99; 40 requests in 4 s")
    assert "profile h100-7b: a 7B model" in assumed["engines"]
    assert "0.5 a GiB of DDR (--ddr-cost-per-gib)" in assumed["prices"]


def test_a_size_that_other_seeds_do_not_share_is_a_range(trace: str) -> None:
    fleet = RUNNER.invoke(build_app(), ["simulate", trace, "--instances", "4", "--policy", "adaptive", "--json"])
    edge_s = json.loads(fleet.stdout)["routers"][0]["ttft_p90_s"]
    goal = ("--slo", f"ttft_p90={1.001 * edge_s}s", "--ddr", "0")
    found = report(trace, *goal, "--seeds", "5")
    count = found["metrics"]["instances_count"]
    least, most = found["metrics"]["instances_least_count"], found["metrics"]["instances_most_count"]
    assert least <= count <= most
    assert least < most
    tried = {row["instances"]: row for row in found["other seeds"]}
    assert {count, count + 1} <= tried.keys()
    assert tried[count]["seeds"] == 5
    assert 0 < tried[count]["seeds_that_keep_the_goals"] < 5 or least < count
    assert f"5 seeds of 10% jitter need {least} to " in found["smallest fleets"][0]["note"]
    sure = report(trace, "--slo", "ttft_p90=300s", "--ddr", "0")
    assert sure["smallest fleets"][0]["note"] == "3 seeds of 10% jitter need the same number"
    assert "other seeds" not in report(trace, *goal, "--seeds", "0")


def test_requests_that_are_shed_stand_in_the_note_and_count_as_waiting_for_ever(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 512 * 120, "output_length": 2_000}
    beginnings = range(0, 120 * 400, 120)
    trace.write_text("".join(json.dumps(line | {"hash_ids": list(range(at, at + 120))}) + "\n" for at in beginnings))
    goal = ("--slo", "ttft_p5=100s", "--attainment", "0.05", "--ddr", "0", "--max-instances", "1", "--seeds", "0")
    (row,) = report(str(trace), *goal)["smallest fleets"]
    assert row["shed_ratio"] > 0.5
    assert row["ttft_p50_s"] is row["ttft_p99_s"] is None
    assert f"{row['shed_ratio']:.1%} of the requests are shed, and count as waiting for ever" in row["note"]


def test_requests_that_no_engine_takes_and_preempted_answers_stand_in_the_table_with_a_note(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    long = {"timestamp": 0, "input_length": 512 * 300, "output_length": 9, "hash_ids": list(range(900, 1200))}
    answers = [
        {"timestamp": number, "input_length": 512, "output_length": 4000, "hash_ids": [number]} for number in range(4)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in (long, *answers)))
    profile = tmp_path / "small.toml"
    shipped = (FOLDER / "h100-7b.toml").read_text()
    profile.write_text(shipped.replace("hbm_blocks = 14486", "hbm_blocks = 160"))
    goal = ("--slo", "ttft_p50=300s", "--ddr", "0", "--max-instances", "1", "--seeds", "0", "--profile", str(profile))
    (row,) = report(str(trace), *goal)["smallest fleets"]
    assert (row["shed_ratio"], row["refused_ratio"]) == (0.0, 0.2)
    assert row["preemptions"] > 0
    assert row["note"].startswith("20.0% of the requests are longer than the profile allows: refused, and in no goal; ")
    assert row["note"].endswith("answers were preempted for lack of blocks, and paused")


def test_a_trace_of_lengths_alone_is_planned(tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:15:{second:02},{900 + second},40" for second in range(30)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    found = report(str(trace), "--slo", "ttft_p99=2s", "--ddr", "0")
    assert found["metrics"]["instances_count"] == 1
    assert "lengths alone" in found["not_run"]["hit_ratio"]


def test_what_is_to_be_run_runs(trace: str) -> None:
    found = report(trace, "--slo", "ttft_p90=400ms", "--ddr", "1GiB", "--policy", "lru", "--limit", "30")
    lines = {each["what"]: each["command"] for each in found["to run it"]}
    words = shlex.split(lines["on one machine"])
    assert words[:2] == ["KVGATE_ENGINE_HBM_POLICY=lru", "KVGATE_ENGINE_DDR_POLICY=lru"]
    assert words[2:4] == ["kvgate", "up"]
    said = RUNNER.invoke(build_app(), words[3:])
    assert isinstance(said.exception, CommandError)
    assert "MODEL-FOLDER: no such folder" in str(said.exception), "nothing else is wrong with it"
    again = RUNNER.invoke(build_app(), [*shlex.split(lines["in virtual time"])[1:], "--json"])
    assert again.exit_code == 0, again.output
    (row,) = json.loads(again.stdout)["routers"]
    assert row["ttft_p99_s"] == found["frontier"][0]["ttft_p99_s"]


@pytest.mark.parametrize(
    ("ends", "code", "why"),
    [(KeyboardInterrupt(), 130, "interrupted"), (CommandError("engine-1 ended"), 1, "engine-1 ended")],
)
def test_a_check_that_comes_to_nothing_leaves_the_plan(
    trace: str, monkeypatch: pytest.MonkeyPatch, ends: BaseException, code: int, why: str
) -> None:
    def lived(*_: object) -> None:
        raise ends

    monkeypatch.setattr("lab.simulate.live.lived", lived)
    goal = ("--slo", "ttft_p99=30s", "--ddr", "0", "--limit", "20")
    said = typed("plan", trace, *goal, "--check", "--check-seconds", "1", "--json")
    assert (said.code, said.err.splitlines()[-1]) == (code, f"kvgate: {why}")
    found = json.loads(said.out)
    assert found["not_run"]["check"] == why
    assert found["metrics"]["instances_count"] == 1
    assert found["to run it"]


def test_tables_are_printed_for_people(trace: str) -> None:
    said = planned(trace, "--slo", "ttft_p99=30s", "--ddr", "0")
    assert "smallest fleets" in said.stdout
    said = planned(trace, "--slo", "ttft_p99=30s", "--ddr", "0", "--markdown", "--seconds", "1")
    assert "**frontier**" in said.stdout
    assert "| requests_count | 10 |" in said.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--slo", "soon"], "'soon' is no goal"),
        (["--slo", "ttft=1s", "--attainment", "0"], "--attainment is 0"),
        (["--slo", "ttft=1s", "--ddr", "much"], "--ddr is 'much'"),
        (["--slo", "ttft=1s", "--ddr", ","], "--ddr names no size"),
        (["--slo", "ttft=1s", "--ddr", "0", "--nvme", "1GiB"], "--nvme needs DDR"),
        (["--slo", "ttft=1s", "--policy", "magic"], "--policy: there is no 'magic': there are lru"),
        (["--slo", "ttft=1s", "--routing", "dynamo_cost"], "--routing: there is no 'dynamo_cost'"),
        (["--slo", "ttft=1s", "--routing", ","], "--routing names none"),
        (["--slo", "ttft=1s", "--profile", "magic"], "unknown profile 'magic'"),
        (["--slo", "ttft=1s", "--ddr", "0,99999999TiB"], "--ddr: 99999999TiB is too much; at most"),
        (["--slo", "ttft=1s", "--ddr", "1GiB", "--nvme", "99999999TiB"], "--nvme: 99999999TiB is too much; at most"),
        (["--slo", "ttft=1s", "--ddr", "900GiB", "--max-instances", "10000"], "at most 200,000,000 are simulated"),
        (["--slo", "ttft=1s", "--json", "--markdown"], "give one of them"),
    ],
)
def test_what_can_not_be_planned_is_said(trace: str, options: list[str], message: str) -> None:
    said = planned(trace, *options)
    assert isinstance(said.exception, CommandError)
    assert message in str(said.exception)


def test_a_trace_that_is_not_there_is_said() -> None:
    said = planned("nowhere.jsonl", "--slo", "ttft=1s")
    assert str(said.exception) == "can't read nowhere.jsonl: No such file or directory"


def test_kinds_are_all_combinations_that_can_be() -> None:
    made = kinds((0, GIB), (0, 2 * GIB), ("lru",), ("cost_aware",))
    assert [(each.ddr_bytes, each.nvme_bytes) for each in made] == [(0, 0), (GIB, 0), (GIB, 2 * GIB)]
    assert str(made[2]) == "HBM + 1 GiB DDR + 2 GiB NVMe, lru, cost_aware"
