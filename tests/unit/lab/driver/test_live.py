"""A run is shown while it goes on: figures in a picture for terminals, in lines elsewhere."""

import asyncio
import io

from rich.console import Console

from lab.driver.answer import Answer, Ending
from lab.driver.drive import Run
from lab.driver.live import LiveView


def run() -> Run:
    def answer(ending: Ending, first_s: float) -> Answer:
        return Answer(
            number=0, due_s=0.0, sent_s=0.1, first_s=first_s, ending=ending, prompt_tokens=100, cached_tokens=40
        )

    answers = [answer(Ending.OK, 0.25), answer(Ending.OK, 1.5), answer(Ending.SHED, 0.0), answer(Ending.FAILED, 0.0)]
    return Run(total=9, answers=answers, in_flight=2, sent=6)


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)


def shown(to: Console) -> str:
    file = to.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


async def test_a_terminal_gets_a_picture() -> None:
    to = console(terminal=True)
    async with LiveView(to, run(), lambda: 3.0).shown():
        await asyncio.sleep(0)
    said = shown(to)
    for part in ("6 of 9", "first token p50", "250 ms", "1,500 ms", "40.0 %", "shed"):
        assert part in said


async def test_elsewhere_a_line_says_it() -> None:
    to = console(terminal=False)
    view = LiveView(to, run(), lambda: 3.0)
    async with view.shown():
        await asyncio.sleep(0)
    assert not shown(to), "a short run says nothing"
    assert view.line() == (
        "3 s: 6 of 9 sent, 2 running, 2 ok, 1 shed, 1 failed; first token p50 250 ms, p99 1,500 ms; cached 40.0 %"
    )


def test_a_run_that_has_just_begun_has_a_line_too() -> None:
    view = LiveView(console(terminal=False), Run(total=9), lambda: 0.0)
    assert view.line() == ("0 s: 0 of 9 sent, 0 running, 0 ok, 0 shed, 0 failed; first token p50 -, p99 -; cached -")
