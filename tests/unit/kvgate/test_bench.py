"""``kvgate bench`` prints one object, a table or Markdown, and refuses what it can't measure."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engines.models.tiny import build_tiny
from kvgate.bench import build_bench
from kvgate.benchmarks.report import Host, Report
from kvgate.failure import CommandError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("models") / "tiny")


def bench(*arguments: str) -> str:
    result = CliRunner().invoke(build_bench(), list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_prefix_prints_one_json_object_and_nothing_else(tiny: Path) -> None:
    report = json.loads(bench("prefix", "--blocks", "10000", "--instances", "2", "--tokenizer", str(tiny), "--json"))
    assert report["bench"] == "prefix"
    looked_up = {"lookup_188_p50_us", "lookup_2048_p50_us", "events_per_s", "bytes_per_held_block"}
    assert looked_up | {"hash_12k_ms", "turn_1k_on_12k_ms"} <= report["metrics"].keys()


def test_markdown_is_a_table() -> None:
    report = Report(bench="prefix", host=Host.here(), metrics={"lookup_188_p50_us": 5.123456})
    assert "| metric | value |\n|---|---:|\n| lookup_188_p50_us | 5.123 |" in report.as_markdown()


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"no tokenizer\.json"):
        bench("prefix", "--tokenizer", str(tmp_path))


def test_a_folder_without_traces_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="there is no mooncake"):
        bench("prefix", "--tokenizer", str(tiny), "--traces", str(tmp_path))
