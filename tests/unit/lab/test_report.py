"""A report says the same as one JSON object, as tables and as Markdown."""

import io
import json

import pytest
from rich.console import Console

from lab.report import Grid, Host, Report


@pytest.fixture
def report() -> Report:
    grid = Grid(
        name="lookups", columns=("structure", "blocks", "p50_us"), rows=(("a|b", 1_000, 5.123456), ("c", 1, None))
    )
    return Report(
        bench="prefix",
        host=Host.here(),
        metrics={"lookup_188_p50_us": 5.123456, "requests_count": 96_248},
        grids=(grid,),
        not_run={"other": "give --peer [x]"},
    )


def test_json_has_the_metrics_each_grid_and_what_was_not_run(report: Report) -> None:
    said = json.loads(report.as_json())
    assert said["metrics"] == {"lookup_188_p50_us": 5.123, "requests_count": 96_248}
    assert '"requests_count": 96248\n' in report.as_json()
    assert said["lookups"][0] == {"structure": "a|b", "blocks": 1_000, "p50_us": 5.123}
    assert said["lookups"][1]["p50_us"] is None
    assert said["not_run"] == {"other": "give --peer [x]"}


def test_markdown_has_a_table_for_each(report: Report) -> None:
    text = report.as_markdown()
    assert "| metric | value |\n|---|---:|\n| lookup_188_p50_us | 5.123 |\n| requests_count | 96,248 |" in text
    assert "| structure | blocks | p50_us |\n|---|---:|---:|\n| a\\|b | 1,000 | 5.123 |\n| c | 1 | - |" in text
    assert text.endswith("| what | why |\n|---|---|\n| other | give --peer [x] |")


def test_tables_show_every_cell(report: Report) -> None:
    console = Console(file=io.StringIO(), width=100)
    for table in report.as_tables():
        console.print(table)
    shown = console.file.getvalue() if isinstance(console.file, io.StringIO) else ""
    assert all(word in shown for word in ("lookup_188_p50_us", "1,000", "5.123", "give --peer [x]"))
