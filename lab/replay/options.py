"""The options of ``kvgate replay``."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from kvgate.failure import CommandError
from lab.driver.options import HttpReplay

_OFFLINE: Final = "Without --url: eviction policies"


class Order(StrEnum):
    """In which order requests come."""

    FILE = "file"
    TIME = "time"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions(HttpReplay):
    """Each field is an option as it was typed; None where one wasn't."""

    trace: Annotated[
        Path,
        typer.Argument(help="A trace in Mooncake's, the agentic or, for --url, Azure's format, plain or gzipped."),
    ]
    policy: Annotated[
        str | None,
        typer.Option(
            help="Policies, like lru,mq(lifetime=2); min is Belady's bound, which knows the future. Default: all.",
            rich_help_panel=_OFFLINE,
        ),
    ] = None
    capacity: Annotated[
        str | None,
        typer.Option(
            help="Blocks in the cache, like 1000,5859. Default: 1 to 50 % of the trace's blocks.",
            rich_help_panel=_OFFLINE,
        ),
    ] = None
    order: Annotated[
        Order | None,
        typer.Option(
            help="Requests as the file has them, or by their times: sessions side by side. Default: file.",
            rich_help_panel=_OFFLINE,
        ),
    ] = None
    jobs: Annotated[
        int | None, typer.Option(min=0, help="Processes; 0, the default: one a core.", rich_help_panel=_OFFLINE)
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")] = False
    plot: Annotated[Path | None, typer.Option(help="Draw the curves to FILE.png, .svg or .pdf too.")] = None

    def check_mode(self) -> None:
        """Raise ``CommandError`` for options that the way of replaying doesn't take."""
        if self.as_json and self.as_markdown:
            raise CommandError("--json and --markdown: give one of them")
        if self.target is None:
            if given := self.given():
                raise CommandError(f"{', '.join(given)}: only with --url URL, which drives a running gateway")
            return
        offline = {
            "--policy": self.policy,
            "--capacity": self.capacity,
            "--order": self.order,
            "--jobs": self.jobs,
        }
        if wrong := [name for name, value in offline.items() if value is not None]:
            raise CommandError(f"{', '.join(wrong)}: only without --url, where policies are replayed")
