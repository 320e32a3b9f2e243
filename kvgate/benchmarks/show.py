"""Prints a report: as JSON, as Markdown, or as tables as wide as they are."""

import sys
from typing import Final

from rich.measure import Measurement

from kvgate.benchmarks.report import Report
from kvgate.display import output

_MAX_WIDTH: Final = 250


def show(report: Report, *, as_json: bool = False, as_markdown: bool = False) -> None:
    """Print a report to standard output."""
    if as_json:
        sys.stdout.write(report.as_json() + "\n")
    elif as_markdown:
        sys.stdout.write(report.as_markdown() + "\n")
    else:
        for table in report.as_tables():
            table.width = Measurement.get(output, output.options.update(max_width=_MAX_WIDTH), table).maximum
            output.print(table, crop=False)


__all__ = ["show"]
