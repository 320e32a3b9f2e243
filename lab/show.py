"""Prints a report: as JSON, as Markdown, or as tables as wide as they are."""

from typing import Final

from rich.measure import Measurement

from kvgate.display import output, write_out
from lab.report import Report

_MAX_WIDTH: Final = 250


def show(report: Report, *, as_json: bool = False, as_markdown: bool = False) -> None:
    """Print a report to standard output; raises ``CommandError`` where that can't be written."""
    if as_json:
        write_out(report.as_json())
    elif as_markdown:
        write_out(report.as_markdown())
    else:
        for table in report.as_tables():
            table.width = Measurement.get(output, output.options.update(max_width=_MAX_WIDTH), table).maximum
            output.print(table, crop=False)
