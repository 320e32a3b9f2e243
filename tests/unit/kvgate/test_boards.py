import io

import pytest
from rich.console import Console

from kvgate import display
from kvgate.boards import PrepareBoard, StartBoard
from kvgate.display import Terminal
from kvgate.failure import CommandError
from kvgate.supervision.supervisor import State
from lab.report import Grid, Host, Report


def written(*, terminal: bool) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=terminal, width=80, highlight=False), text


def test_outside_a_terminal_each_event_is_a_line() -> None:
    console, text = written(terminal=False)
    board = StartBoard(console)
    with board.shown():
        board("engine-0", State.STARTING, 0.0)
        board("engine-0", State.READY, 3.21)
    assert text.getvalue().split("\n") == ["  engine-0 starting", "  engine-0 ready after 3.2 s", ""]


def test_in_a_terminal_the_last_picture_stays() -> None:
    console, text = written(terminal=True)
    board = StartBoard(console)
    with board.shown():
        board("engine-0", State.STARTING, 0.0)
        board("gateway", State.STARTING, 0.0)
        board("engine-0", State.READY, 3.21)
    assert "ready after 3.2 s" in text.getvalue()
    assert "gateway" in text.getvalue()


def test_where_the_locale_is_ascii_boards_and_tables_are_drawn_with_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    for utf8 in (True, False):
        monkeypatch.setattr(display, "locale_is_utf8", lambda utf8=utf8: utf8)
        text = io.StringIO()
        console = Terminal(file=text, force_terminal=True, width=40, highlight=False)
        board = StartBoard(console)
        with board.shown():
            board("engine-0", State.STARTING, 0.0)
            board("gateway", State.READY, 1.0)
        with PrepareBoard(console) as preparing:
            preparing.begin("Fetching", 1000)
            preparing.reached(500)
        grid = Grid(name="cases", columns=("a column", "n"), rows=(("a name of many letters " + "x" * 60, 1),))
        for table in Report(bench="b", host=Host.here(), metrics={"p50_us": 1.0}, grids=(grid,)).as_tables():
            console.print(table)
        assert text.getvalue().isascii() is not utf8


@pytest.mark.parametrize("terminal", [True, False])
def test_a_preparation_shows_its_steps(*, terminal: bool) -> None:
    console, text = written(terminal=terminal)
    with PrepareBoard(console) as board:
        board.begin("Fetching", 1000)
        board.reached(500)
        board.begin("Converting")
    assert "Fetching: 0.0 s" in text.getvalue()
    assert "Converting: 0.0 s" in text.getvalue()


def test_a_step_that_failed_is_not_called_done() -> None:
    console, text = written(terminal=False)
    with pytest.raises(CommandError), PrepareBoard(console) as board:  # noqa: PT012 - the step and its failure
        board.begin("Fetching", 1000)
        raise CommandError("no network")
    assert text.getvalue() == "  Fetching ...\n"
