"""Prints a report: as JSON, as Markdown, or as tables."""

from kvgate.display import print_table, write_out
from lab.report import Report


def show(report: Report, *, as_json: bool = False, as_markdown: bool = False) -> None:
    """Print a report to standard output; raises ``CommandError`` where that can't be written."""
    if as_json:
        write_out(report.as_json())
    elif as_markdown:
        write_out(report.as_markdown())
    else:
        for table in report.as_tables():
            print_table(table, wraps=False)
