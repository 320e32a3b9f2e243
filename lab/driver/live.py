"""What a person sees while a run goes on: a picture kept up to date in a terminal, a line at times elsewhere."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table

from lab.driver.answer import Answer, Ending
from lab.driver.drive import Run
from lab.driver.summary import quantile

_REFRESH_S = 0.25
_LINE_EVERY_S = 10.0
_RECENT = 500


class LiveView:
    """Shows one run; ``clock`` counts from its beginning."""

    def __init__(self, console: Console, run: Run, clock: Callable[[], float]) -> None:
        self._console = console
        self._run = run
        self._clock = clock
        self._counted = 0
        self._endings: Counter[Ending] = Counter()
        self._recent: deque[Answer] = deque(maxlen=_RECENT)
        self._prompt = self._cached = self._output = 0

    @asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """Show it until the block ends."""
        if self._console.is_terminal:
            with Live(self._table(), console=self._console, auto_refresh=False, transient=True) as live:

                def refresh() -> None:
                    live.update(self._table(), refresh=True)

                async with _repeated(refresh, _REFRESH_S):
                    yield
        else:

            def say() -> None:
                self._console.print(f"  {self.line()}", markup=False, soft_wrap=True)

            async with _repeated(say, _LINE_EVERY_S):
                yield

    def _count(self) -> None:
        answers = self._run.answers
        for each in answers[self._counted :]:
            self._endings[each.ending] += 1
            self._prompt += each.prompt_tokens
            self._cached += each.cached_tokens
            self._output += each.completion_tokens
            if each.ok:
                self._recent.append(each)
        self._counted = len(answers)

    def line(self) -> str:
        """Return where the run stands, in one line."""
        self._count()
        run, now_s = self._run, self._clock()
        return (
            f"{now_s:.0f} s: {run.sent} of {run.total} sent, {run.in_flight} running, {self._endings[Ending.OK]} ok, "
            f"{self._endings[Ending.SHED]} shed, {self._endings[Ending.FAILED]} failed; first token p50 "
            f"{self._first(0.5)}, p99 {self._first(0.99)}; cached {self._found()}"
        )

    def _table(self) -> Table:
        self._count()
        run, now_s = self._run, self._clock()
        table = Table.grid(padding=(0, 2))
        table.add_row("time", f"{now_s:.1f} s", "sent", f"{run.sent:,} of {run.total:,}")
        table.add_row("running", f"{run.in_flight:,}", "ok", f"[green]{self._endings[Ending.OK]:,}[/]")
        table.add_row("shed", f"{self._endings[Ending.SHED]:,}", "failed", f"[red]{self._endings[Ending.FAILED]:,}[/]")
        table.add_row("first token p50", self._first(0.5), "p99", self._first(0.99))
        table.add_row("tokens out a second", f"{self._output / max(now_s, 1e-9):,.1f}", "cached", self._found())
        return table

    def _first(self, share: float) -> str:
        if not self._recent:
            return "-"
        return f"{1000 * quantile(sorted(each.ttft_s for each in self._recent), share):,.0f} ms"

    def _found(self) -> str:
        return f"{100 * self._cached / self._prompt:.1f} %" if self._prompt else "-"


@asynccontextmanager
async def _repeated(work: Callable[[], None], every_s: float) -> AsyncIterator[None]:
    async def repeat() -> None:
        while True:
            await asyncio.sleep(every_s)
            work()

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
