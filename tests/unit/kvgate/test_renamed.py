"""Old names of options are read and answered with the new ones; help has the new ones alone."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvgate.renamed import RenamingCommand, renamed
from tests.support.command import typed

TRACE = '{"hash_ids": [1, 2], "input_length": 1024, "output_length": 4, "timestamp": 0}\n'


@renamed({"--old": "--new"})
def run(words: list[str], *, new: str = "none") -> None:
    print(new, *words)  # noqa: T201 - what it was given


APP = typer.Typer(add_completion=False)
APP.command(cls=RenamingCommand)(run)


@pytest.mark.parametrize("typed_words", [["--old", "x", "a"], ["--old=x", "a"]])
def test_an_old_name_is_read_with_a_line_that_has_the_new_one(typed_words: list[str]) -> None:
    said = CliRunner().invoke(APP, typed_words)
    assert said.stdout == "x a\n"
    assert said.stderr == "kvgate: --old is deprecated: use --new\n"


def test_what_follows_two_dashes_is_no_option() -> None:
    assert CliRunner().invoke(APP, ["--", "--old"]).stdout == "none --old\n"


def test_help_has_the_new_name_alone() -> None:
    said = CliRunner().invoke(APP, ["--help"]).output
    assert "--new" in said
    assert "--old" not in said


@pytest.mark.parametrize(
    ("command", "old", "new"),
    [
        (("simulate", "TRACE", "--json"), ("--router", "round_robin"), ("--routing", "round_robin")),
        (("simulate", "TRACE", "--json"), ("--ddr", "2"), ("--ddr", "14GiB")),
        (
            ("plan", "TRACE", "--slo", "ttft_p99=30s", "--json", "--max-instances", "2"),
            ("--policies", "lru"),
            ("--policy", "lru"),
        ),
        (
            ("plan", "TRACE", "--slo", "ttft_p99=30s", "--json", "--max-instances", "2"),
            ("--rate-scale", "2"),
            ("--speed", "2"),
        ),
        (
            ("plan", "TRACE", "--slo", "ttft_p99=30s", "--json", "--max-instances", "2"),
            ("--limit-requests", "1"),
            ("--limit", "1"),
        ),
    ],
)
def test_commands_do_the_same_by_the_old_name(
    tmp_path: Path, command: tuple[str, ...], old: tuple[str, str], new: tuple[str, str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(TRACE)
    words = [str(trace) if word == "TRACE" else word for word in command]
    before, after = typed(*words, *old), typed(*words, *new)
    assert before.code == after.code == 0
    assert f"use {new[0]}" in before.err or f": {new[0]} " in before.err
    assert "deprecated" not in after.err
    assert json.loads(before.out).keys() == json.loads(after.out).keys()


@pytest.mark.parametrize("command", ["replay", "conformance"])
def test_a_gateway_is_named_with_url_and_by_its_old_name(command: str) -> None:
    words = ["/nonexistent"] if command == "replay" else ["--only", "nothing-like-it"]
    assert "--url" in typed(command, "--help").out
    assert typed(command, *words, "--target", "http://127.0.0.1:1").err.startswith(
        "kvgate: --target is deprecated: use --url\n"
    )
