"""What a person sees while things start: lines that tick in a terminal, one line per event elsewhere."""

import locale
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.spinner import Spinner
from rich.table import Table

from kvgate.failure import CommandError
from kvgate.supervision.supervisor import State

_CHOSEN = ("PYTHONUTF8", "PYTHONIOENCODING")


def locale_is_utf8() -> bool:
    """Return whether the locale is one of UTF-8; Python itself takes C and POSIX for such."""
    if any(os.environ.get(name) for name in _CHOSEN):
        return True
    overruled = bool(sys.flags.utf8_mode) and os.environ.get("LANG") in {"C", "POSIX"}  # LC_CTYPE is Python's own then
    return _is_utf8(locale.getencoding()) and not overruled


def draws_unicode(console: Console) -> bool:
    """Return whether bars and curves may be other characters than ASCII's on a console."""
    return _is_utf8(console.encoding)


def _is_utf8(encoding: str) -> bool:
    return encoding.lower().replace("-", "").startswith("utf8")


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

REFRESH_PER_S = 8


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


def plain(text: str = "") -> None:
    """Print one line as it is: no markup, no wrapping."""
    output.print(text, markup=False, soft_wrap=True)


class StartBoard:
    """A ``supervisor.Watcher`` that shows each child's state."""

    def __init__(self, console: Console = output) -> None:
        self._console = console
        self._live: Live | None = None
        self._states: dict[str, tuple[State, float]] = {}
        fine = draws_unicode(console)
        self._spinner = Spinner("dots" if fine else "line")
        self._ready, self._stopping = "✓·" if fine else "+-"
        self._since_s = time.monotonic()

    def __call__(self, child: str, state: State, elapsed_s: float) -> None:
        self._states[child] = (state, elapsed_s)
        if self._live is not None:
            self._live.update(self._table())
        elif state is State.READY:
            self._console.print(f"  {child} ready after {elapsed_s:.1f} s")
        elif state is State.STARTING:
            self._console.print(f"  {child} starting")

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Keep the board on a terminal until the block ends; its last picture stays."""
        if not self._console.is_terminal:
            yield
            return
        self._since_s = time.monotonic()
        with Live(console=self._console, refresh_per_second=REFRESH_PER_S, get_renderable=self._table) as self._live:
            try:
                yield
            finally:
                self._live.update(self._table())
        self._live = None

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 1))
        for child, (state, elapsed_s) in self._states.items():
            if state is State.STARTING:
                waited_s = time.monotonic() - self._since_s
                table.add_row("", self._spinner, child, f"[dim]loading, {waited_s:.0f} s[/]")
            elif state is State.READY:
                table.add_row("", f"[green]{self._ready}[/]", child, f"ready after {elapsed_s:.1f} s")
            else:
                table.add_row("", f"[dim]{self._stopping}[/]", child, "[dim]stopping[/]")
        return table


class PrepareBoard:
    """An ``engines.models.cache.Progress``: a bar for each step in a terminal, one line a step elsewhere."""

    def __init__(self, console: Console = output) -> None:
        self._console = console
        self._bars = Progress(
            SpinnerColumn("dots" if draws_unicode(console) else "line"),
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._step: tuple[str, float] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(done=kind is None)
        self._bars.stop()

    def begin(self, what: str, total_bytes: int | None = None) -> None:
        """Show a new step; the one before is done."""
        self._end(done=True)
        self._step = (what, time.monotonic())
        if self._console.is_terminal:
            self._bars.start()
            self._task = self._bars.add_task(escape(what), total=total_bytes)
        else:
            self.note(f"{what} ...")

    def reached(self, done_bytes: int) -> None:
        """Move the step's bar."""
        if self._task is not None:
            self._bars.update(self._task, completed=done_bytes)

    def note(self, what: str) -> None:
        """Print a line above the bars."""
        self._console.print(f"  {what}", markup=False, soft_wrap=True)

    def _end(self, *, done: bool) -> None:
        if self._step is None:
            return
        what, since_s = self._step
        if self._task is not None:
            self._bars.remove_task(self._task)
            self._task = None
        if done:
            self.note(f"{what}: {time.monotonic() - since_s:.1f} s")
        self._step = None
