"""``kvgate bench NAME``: one subcommand for each benchmark; ``--json`` prints one object and nothing else."""

import asyncio
import sys
from typing import Annotated

import typer

from kvgate.benchmarks import revisit
from kvgate.benchmarks.report import Host, Report
from kvgate.benchmarks.timed_chat import BenchmarkError
from kvgate.display import output
from kvgate.failure import CommandError

_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def build_bench() -> typer.Typer:
    """Return the ``bench`` command with its subcommands."""
    bench = typer.Typer(
        name="bench", help="Measure, on this machine, what kvgate's numbers claim.", no_args_is_help=True
    )
    bench.command(revisit.NAME)(run_revisit)
    return bench


def run_revisit(  # noqa: PLR0913 - each is one option
    *,
    url: Annotated[str, typer.Option(help="The gateway to measure.")] = "http://127.0.0.1:8000",
    against: Annotated[
        str | None, typer.Option(help="A second gateway, the baseline; both get the same work, turn by turn.")
    ] = None,
    conversations: Annotated[int, typer.Option(min=1, help="Chats that take turns.")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each chat.")] = 4,
    first_words: Annotated[int, typer.Option(min=1, help="Length of each first message, in words.")] = 400,
    turn_words: Annotated[int, typer.Option(min=1, help="Length of each later message, in words.")] = 30,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 16,
    seed: Annotated[int, typer.Option(help="Another seed, other texts.")] = 0,
    as_json: _AsJson = False,
) -> None:
    """Several chats take turns: what does a cached past save, and does routing find it?"""
    plan = revisit.RevisitPlan(
        conversations=conversations,
        turns=turns,
        first_words=first_words,
        turn_words=turn_words,
        max_tokens=max_tokens,
        seed=seed,
    )
    urls = [url.rstrip("/")] if against is None else [url.rstrip("/"), against.rstrip("/")]
    try:
        metrics = asyncio.run(revisit.run(urls, plan))
    except BenchmarkError as error:
        raise CommandError(str(error)) from error
    _show(Report(bench=revisit.NAME, host=Host.here(), metrics=metrics), as_json=as_json)


def _show(report: Report, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(report.as_json() + "\n")
    else:
        output.print(report.as_table())


__all__ = ["build_bench"]
