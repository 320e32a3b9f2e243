import io

import pytest
from rich.console import Console

from kvgate import display
from kvgate.display import show_failure
from kvgate.failure import CommandError


def test_a_failure_keeps_its_paths_whole_and_its_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    console = Console(file=text, width=80, highlight=False)
    monkeypatch.setattr(display, "errors", console)
    path = "/a/very/long/path" * 10
    show_failure(CommandError(f"can't read {path} [Errno 5]", "try [this]"))
    assert text.getvalue().splitlines() == [f"kvgate: can't read {path} [Errno 5]", "-> try [this]"]
