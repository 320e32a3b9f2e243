"""How far simulated fleets have come: a bar in a terminal, a line at times elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvgate.display import draws_unicode, errors

_LINE_EVERY_S = 5.0

Told = Callable[[float], None]
"""Is told now and then what time it is in a fleet; see ``Fleet.run``."""


class FleetBoard:
    """One fleet at a time; ``clock`` is real time."""

    def __init__(self, console: Console = errors, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock

    @contextmanager
    def shown(self, what: str, lasts_s: float) -> Iterator[Told]:
        """Show a fleet that serves ``lasts_s`` of virtual time until the block ends."""
        if not self._console.is_terminal:
            yield self._lines(what, lasts_s)
            return
        with Progress(
            SpinnerColumn("dots" if draws_unicode(self._console) else "line"),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} s of virtual time"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        ) as bars:
            task = bars.add_task(what, total=max(lasts_s, 1e-9))
            yield lambda virtual_s: bars.update(task, completed=min(virtual_s, lasts_s))

    def _lines(self, what: str, lasts_s: float) -> Told:
        began_s = shown_s = self._clock()

        def show(virtual_s: float) -> None:
            nonlocal shown_s
            now_s = self._clock()
            if now_s - shown_s < _LINE_EVERY_S:
                return
            shown_s = now_s
            share = min(1.0, virtual_s / lasts_s) if lasts_s else 1.0
            took_s = now_s - began_s
            left = f", about {took_s * (1 - share) / share:.0f} s to go" if share else ""
            come = f"{virtual_s:,.0f} of {lasts_s:,.0f} s of virtual time ({share:.0%}) after {took_s:.0f} s"
            self._console.print(f"  {what}: {come}{left}", markup=False, soft_wrap=True)

        return show
