"""``kvgate replay``: rows by policy and capacity in every form, and refusals that say what is allowed."""

import gzip
import json
import multiprocessing
import os
import threading
from pathlib import Path
from unittest.mock import patch

import pytest
import typer
from typer.testing import CliRunner, Result

from kvcontrol.kv_policy import POLICIES
from kvcontrol.kv_policy.spec import parse_specs
from kvgate.failure import CommandError
from lab.replay import command as replay
from lab.replay import sweep
from lab.replay.sweep import Sweep

PROMPTS = [(0, [1, 2, 3]), (3, [4, 5]), (1, [1, 2, 6]), (4, [7, 8]), (2, [1, 2, 3])]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [{"hash_ids": ids, "input_length": 512 * len(ids) - 12, "timestamp": at} for at, ids in PROMPTS]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(trace: Path, *arguments: str) -> Result:
    app = typer.Typer()
    app.command()(replay.replay)
    result = CliRunner().invoke(app, [str(trace), "--jobs", "1", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result


def test_json_is_one_object_with_a_row_for_each_policy_and_capacity(trace: Path) -> None:
    result = run(trace, "--policy", "lru,min,mq(lifetime=2)", "--capacity", "3,100", "--json")
    said = json.loads(result.stdout)
    assert said.keys() == {"trace", "rows"}
    assert said["trace"] == str(trace)
    assert [(row["policy"], row["capacity_blocks"]) for row in said["rows"]] == [
        *(("lru", 3), ("lru", 100), ("min", 3), ("min", 100), ("mq(lifetime=2)", 3), ("mq(lifetime=2)", 100))
    ]
    everything = {"block": 5 / 13, "prefix": 5 / 13, "token": (1024 + 1524) / 6596, "req": (1024 / 1524 + 1) / 5}
    for row in said["rows"][1::2]:
        assert {name: row[name] for name in everything} == pytest.approx(everything, abs=1e-6)
    assert said["rows"][0]["token"] == pytest.approx(2 * 512 / 6596, abs=1e-6)
    assert said["rows"][2]["token"] > said["rows"][0]["token"]
    assert "6/6" in result.stderr


def test_a_trace_without_blocks_is_refused_with_the_commands_that_take_it(tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n")
    for order in ("file", "time"):
        with pytest.raises(CommandError, match="no blocks that policies could keep; kvgate plan, kvgate simulate"):
            run(trace, "--policy", "lru", "--order", order)


def test_several_processes_find_what_one_does(trace: Path) -> None:
    wanted = ("--policy", "lru,arc,min", "--capacity", "2,4", "--json")
    assert run(trace, *wanted, "--jobs", "2").stdout == run(trace, *wanted).stdout


def test_a_trace_may_come_through_a_pipe(trace: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    for data in (trace.read_bytes(), gzip.compress(trace.read_bytes())):
        os.mkfifo(pipe)
        writer = threading.Thread(target=pipe.write_bytes, args=(data,))
        writer.start()
        wanted = ("--policy", "lru,arc", "--capacity", "2", "--json", "--jobs", "2")
        rows = json.loads(run(pipe, *wanted).stdout)["rows"]
        writer.join()
        pipe.unlink()
        assert rows == json.loads(run(trace, *wanted).stdout)["rows"]


def test_an_interruption_ends_the_processes_and_what_they_were_about_to_do(trace: Path) -> None:
    told: list[str] = []

    def interrupt(what: str) -> None:
        told.append(what)
        raise KeyboardInterrupt

    wanted = Sweep(trace=trace, policies=parse_specs("lru,arc,fifo,mq,lfu"), capacities=[1, 2, 3, 4], jobs=2)
    with pytest.raises(KeyboardInterrupt):
        sweep.run(wanted, [], interrupt)
    assert len(told) == 1
    assert multiprocessing.active_children() == []


def test_all_policies_and_shares_of_the_trace_are_the_default(trace: Path) -> None:
    rows = json.loads(run(trace, "--json").stdout)["rows"]
    assert {row["policy"] for row in rows} == {*POLICIES, "min"}
    assert {row["capacity_blocks"] for row in rows} == {1, 4}


def test_requests_can_come_by_their_times(trace: Path) -> None:
    wanted = ("--policy", "lru", "--capacity", "5", "--json")
    assert run(trace, *wanted).stdout != run(trace, *wanted, "--order", "time").stdout


def test_markdown_has_a_column_for_each_policy_and_the_share_of_the_ceiling(trace: Path) -> None:
    text = run(trace, "--policy", "lru,min", "--capacity", "100", "--markdown").stdout
    assert "| capacity_blocks | lru | min |" in text
    assert "| lru | 100 | 0.3846 | 0.3846 | 0.3863 | 0.3344 | 1.0 |" in text
    assert "| distinct_blocks | 8 |" in text


def test_people_get_tables(trace: Path) -> None:
    assert "token_of_ceiling" in run(trace, "--policy", "lru", "--capacity", "100").stdout


def test_curves_are_drawn_beside_any_output(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    picture = tmp_path / "curves.png"
    result = run(trace, "--policy", "lru,min", "--capacity", "2,4", "--json", "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(result.stdout)["rows"]


def test_without_matplotlib_a_plot_is_refused_before_anything_is_replayed(trace: Path, tmp_path: Path) -> None:
    with patch.object(replay, "find_spec", return_value=None), pytest.raises(CommandError) as refused:
        run(trace, "--plot", str(tmp_path / "curves.png"))
    assert refused.value.advice == "pip install 'kvgate[plot]'"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--policy", "lur"), "unknown policy 'lur'; known: lru, .*, min"),
        (("--policy", "mq(life=1)"), "it has lifetime, ghosts"),
        (("--policy", "min(x=1)"), "min has no parameters"),
        (("--policy", ""), "no policy is named"),
        (("--capacity", "many"), "'many' is no whole number of blocks"),
        (("--capacity", "0"), "a capacity of 0 blocks; allowed is 1 or more"),
        (("--capacity", "5,5"), "5 is named twice"),
        (("--json", "--markdown"), "give one of them"),
        (("--plot", "curves.gif"), "pictures are .png, .svg, .pdf"),
        (("--plot", "/no/such/folder/curves.png"), "there is no folder"),
    ],
)
def test_what_is_not_allowed_is_refused_with_what_is(trace: Path, arguments: tuple[str, ...], why: str) -> None:
    with pytest.raises(CommandError, match=why):
        run(trace, *arguments)


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"can't read .*none: No such file"):
        run(tmp_path / "none")
    (tmp_path / "text").write_text("hello\n")
    with pytest.raises(CommandError, match="text, line 1: not JSON"):
        run(tmp_path / "text")
