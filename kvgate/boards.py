"""What a person sees while things start: lines that tick in a terminal, one line per event elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.spinner import Spinner
from rich.table import Table

from kvgate.display import draws_unicode, errors, output
from kvgate.supervision.supervisor import State

REFRESH_PER_S = 8


@contextmanager
def checking(console: Console = errors) -> Iterator[Callable[[str], None]]:
    """Yield what shows the check that runs now: beside a spinner in a terminal, a line for each check elsewhere."""
    if not console.is_terminal:
        yield lambda name: console.print(f"  checking {name}", markup=False, soft_wrap=True)
        return
    with console.status("checking", spinner="dots" if draws_unicode(console) else "line") as status:
        yield lambda name: status.update(f"checking {escape(name)}")


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
