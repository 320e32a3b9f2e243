"""How to drive a target with a trace, and what to report of it: checked values, named as on the command line."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

import typer

from kvgate.failure import CommandError
from lab.driver.work import Lengths, Pace

_ASK: Final = "With --url: how to ask"
_REPORT: Final = "With --url: what to report"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpReplay:
    """The options as they were typed; None where one wasn't."""

    target: Annotated[
        str | None,
        typer.Option("--url", help="Drive this gateway (http://127.0.0.1:8000) with the trace.", rich_help_panel=_ASK),
    ] = None
    model: Annotated[
        str | None, typer.Option(help="The model to ask for. Default: the only one served.", rich_help_panel=_ASK)
    ] = None
    api_key: Annotated[
        str | None, typer.Option(envvar="KVGATE_API_KEY", help="The API key to present.", rich_help_panel=_ASK)
    ] = None
    metrics_key: Annotated[
        str | None,
        typer.Option(
            envvar="KVGATE_METRICS_KEY",
            help="The gateway's metrics_key, where its /metrics asks for one.",
            rich_help_panel=_ASK,
        ),
    ] = None
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="A model folder to take the tokenizer from. Default: the target's /tokenize.", rich_help_panel=_ASK
        ),
    ] = None
    speed: Annotated[
        float | None, typer.Option(help="How many times as fast as the trace's times.", rich_help_panel=_ASK)
    ] = None
    rate: Annotated[
        float | None,
        typer.Option(help="Requests a second in the mean; gaps keep their proportions.", rich_help_panel=_ASK),
    ] = None
    users: Annotated[
        int | None,
        typer.Option(
            help="Closed loop: so many users, each waits for its answer; "
            "a user goes through one session after another.",
            rich_help_panel=_ASK,
        ),
    ] = None
    think: Annotated[
        float | None, typer.Option(help="Seconds between an answer and a user's next request.", rich_help_panel=_ASK)
    ] = None
    duration: Annotated[
        float | None, typer.Option(help="Send for so many seconds, then wait for what runs.", rich_help_panel=_ASK)
    ] = None
    limit: Annotated[int | None, typer.Option(help="Only the first N requests of the trace.", rich_help_panel=_ASK)] = (
        None
    )
    scale_length: Annotated[
        float | None,
        typer.Option(
            help="Multiply the trace's lengths (0.03125: blocks of 512 tokens have 16).", rich_help_panel=_ASK
        ),
    ] = None
    max_output: Annotated[int | None, typer.Option(help="Tokens of an answer at most.", rich_help_panel=_ASK)] = None
    leave_out_long: Annotated[
        bool,
        typer.Option(
            "--leave-out-long", help="Leave out what is longer than the model's context.", rich_help_panel=_ASK
        ),
    ] = False
    seed: Annotated[
        int | None, typer.Option(help="Another number makes all texts others: a cold cache.", rich_help_panel=_ASK)
    ] = None
    timeout: Annotated[
        float | None, typer.Option(help="Seconds that one request may take. Default: 300.", rich_help_panel=_ASK)
    ] = None
    slo_ttft: Annotated[
        float | None, typer.Option(help="Goal for the first token, seconds.", rich_help_panel=_REPORT)
    ] = None
    slo_itl: Annotated[
        float | None, typer.Option(help="Goal for the mean time between tokens, seconds.", rich_help_panel=_REPORT)
    ] = None
    gpu_hour_usd: Annotated[
        float | None, typer.Option("--gpu-hour-usd", help="What an instance costs an hour.", rich_help_panel=_REPORT)
    ] = None
    instances: Annotated[
        int | None,
        typer.Option(
            help="How many instances cost that. Default: as many as the gateway can use.", rich_help_panel=_REPORT
        ),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(help="Write report.json, report.md and report.png to this folder.", rich_help_panel=_REPORT),
    ] = None

    def given(self) -> list[str]:
        """Return the options that were given, but for ``--url`` itself and what the environment may say."""
        names = [each for each in HttpReplay.__dataclass_fields__ if each not in {"target", "api_key", "metrics_key"}]
        return [_option(each) for each in names if getattr(self, each) not in {None, False}]

    def check(self) -> None:
        """Raise ``CommandError`` for values and combinations that aren't allowed."""
        for name in ("speed", "rate", "duration", "scale_length", "timeout", "slo_ttft", "slo_itl", "gpu_hour_usd"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise CommandError(f"{_option(name)} {value}: a number above 0 is allowed")
        for name, least in (("users", 1), ("limit", 1), ("max_output", 1), ("instances", 1), ("think", 0), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and not least <= value < math.inf:
                raise CommandError(f"{_option(name)} {value}: {least} or more is allowed")
        self._check_together()
        parts = urlsplit(self.target or "")
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise CommandError(f"--url {self.target}: an address like http://127.0.0.1:8000 is allowed")

    def _check_together(self) -> None:
        given = [_option(name) for name in ("speed", "rate", "users") if getattr(self, name) is not None]
        if len(given) > 1:
            raise CommandError(f"{' and '.join(given)}: give one of them")
        if self.think is not None and self.users is None:
            raise CommandError("--think is of --users: by the clock nobody waits")
        if self.instances is not None and self.gpu_hour_usd is None:
            raise CommandError("--instances says how many cost --gpu-hour-usd: give that too")

    @property
    def pace(self) -> Pace:
        return Pace(speed=self.speed or 1.0, rate=self.rate, users=self.users, think_s=self.think or 0.0)

    @property
    def lengths(self) -> Lengths:
        return Lengths(
            scale=self.scale_length or 1.0, most_output_tokens=self.max_output, leave_out_long=self.leave_out_long
        )

    def how(self, trace: Path, model: str) -> str:
        """Return one line that says what was asked of whom."""
        pace = self.pace
        if pace.users is not None:
            loop = f"{pace.users} users" + (f", {pace.think_s:g} s of thought" if pace.think_s else "")
        else:
            loop = f"{pace.rate:g} requests a second" if pace.rate else f"the trace's times x {pace.speed:g}"
        return f"{trace.name} at {self.target} ({model}), {loop}, lengths x {self.lengths.scale:g}"


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"
