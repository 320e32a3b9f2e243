import io

import pytest
from rich.console import Console

from kvgate import display
from kvgate.display import PrepareBoard, StartBoard, show_failure
from kvgate.failure import CommandError
from kvgate.supervisor import State


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


def test_a_failure_keeps_its_paths_whole_and_its_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    console, text = written(terminal=False)
    monkeypatch.setattr(display, "errors", console)
    path = "/a/very/long/path" * 10
    show_failure(CommandError(f"can't read {path} [Errno 5]", "try [this]"))
    assert text.getvalue().splitlines() == [f"kvgate: can't read {path} [Errno 5]", "-> try [this]"]
