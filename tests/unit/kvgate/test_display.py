import io

import pytest
from rich.console import Console
from rich.table import Table

from kvgate import display
from kvgate.display import Terminal, print_table, show_failure
from kvgate.failure import CommandError


def test_a_failure_keeps_its_paths_whole_and_its_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    console = Console(file=text, width=80, highlight=False)
    monkeypatch.setattr(display, "errors", console)
    path = "/a/very/long/path" * 10
    show_failure(CommandError(f"can't read {path} [Errno 5]", "try [this]"))
    assert text.getvalue().splitlines() == [f"kvgate: can't read {path} [Errno 5]", "-> try [this]"]


@pytest.mark.parametrize(("terminal", "wraps"), [(True, True), (True, False), (False, True)])
def test_a_table_wraps_its_cells_in_a_terminal_alone_and_its_title_nowhere(
    *, terminal: bool, wraps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = io.StringIO()
    monkeypatch.setattr(
        display, "output", Terminal(file=text, force_terminal=terminal, no_color=True, width=40, highlight=False)
    )
    title, cell = "a title of several words that is longer than forty columns", "several words " * 20
    table = Table(title=title)
    table.add_column("what")
    table.add_row(cell.strip())
    print_table(table, wraps=wraps)
    lines = text.getvalue().splitlines()
    assert title in lines[0]
    assert (len(lines) == 6) is (cell.strip() in text.getvalue()) is not (terminal and wraps)
