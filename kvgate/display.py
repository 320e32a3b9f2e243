"""The consoles that commands print to, and how a failure is printed."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from kvgate.charset import is_utf8, locale_is_utf8
from kvgate.failure import CommandError

_WIDEST: Final = 4096
"""Columns of a table that is not for a terminal."""


def draws_unicode(console: Console) -> bool:
    """Return whether bars and curves may be other characters than ASCII's on a console."""
    return is_utf8(console.encoding)


class Terminal(Console):
    """A console that draws its frames and bars with ASCII where the locale knows nothing else."""

    @property
    def encoding(self) -> str:
        return super().encoding if locale_is_utf8() else "ascii"

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does; ``CommandError`` where standard output can't be written."""
        if self.stderr:
            super().print(*objects, **options)
        else:
            with _writing():
                super().print(*objects, **options)


output = Terminal(highlight=False)
errors = Terminal(stderr=True, highlight=False)


def show_failure(error: CommandError) -> None:
    """Print a failure and its advice to standard error, unwrapped, so that paths can be copied."""
    errors.print(f"[bold red]kvgate:[/] {escape(error.message)}", soft_wrap=True)
    if error.advice:
        errors.print(f"[dim]->[/] {escape(error.advice)}", soft_wrap=True)


def write_out(text: str) -> None:
    """Write a report and a newline to standard output as it is, to the end; ``CommandError`` where that can't be."""
    if sys.stdout is None:
        raise CommandError("standard output is closed")
    with _writing():
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise  # whoever read it has had enough: the command ends without a word
    except OSError as error:
        with suppress(OSError):  # what takes its place may have no descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())  # or what is left would fail once more when the process ends
            os.close(nowhere)
        raise CommandError(f"cannot write to standard output: {error.strerror or error}") from error


def print_table(table: Table, *, wraps: bool = True) -> None:
    """Print a table: cells wrap in a terminal where ``wraps``; a pipe gets a line for each row. Titles never wrap."""
    if table.title is not None:
        output.print(table.title, style="table.title", soft_wrap=True)
        table.title = None
    if wraps and output.is_terminal:
        output.print(table)
        return
    for column in table.columns:
        column.no_wrap = True
    table.width = Measurement.get(output, output.options.update(max_width=_WIDEST), table).maximum
    output.print(table, crop=False)


def note(text: str) -> None:
    """Print one line beside a command's answer, to standard error."""
    errors.print(text, markup=False, soft_wrap=True)


def plain(text: str = "") -> None:
    """Print one line as it is: no markup, no wrapping."""
    output.print(text, markup=False, soft_wrap=True)
