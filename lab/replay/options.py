"""The options of ``kvgate replay --target`` as typer reads them."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

_ASK = "With --target: how to ask"
_REPORT = "With --target: what to report"

TargetOption: TypeAlias = Annotated[
    str | None, typer.Option(help="Drive this gateway (http://127.0.0.1:8000) with the trace.", rich_help_panel=_ASK)
]
ModelOption: TypeAlias = Annotated[
    str | None, typer.Option(help="The model to ask for. Default: the only one served.", rich_help_panel=_ASK)
]
KeyOption: TypeAlias = Annotated[
    str | None, typer.Option(envvar="KVGATE_API_KEY", help="The API key to present.", rich_help_panel=_ASK)
]
MetricsKeyOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        envvar="KVGATE_METRICS_KEY",
        help="The gateway's metrics_key, where its /metrics asks for one.",
        rich_help_panel=_ASK,
    ),
]
TokenizerOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="A model folder to take the tokenizer from. Default: the target's /tokenize.", rich_help_panel=_ASK
    ),
]
SpeedOption: TypeAlias = Annotated[
    float | None, typer.Option(help="How many times as fast as the trace's times.", rich_help_panel=_ASK)
]
RateOption: TypeAlias = Annotated[
    float | None, typer.Option(help="Requests a second in the mean; gaps keep their proportions.", rich_help_panel=_ASK)
]
UsersOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        help="Closed loop: so many users, each waits for its answer; a user goes through one session after another.",
        rich_help_panel=_ASK,
    ),
]
ThinkOption: TypeAlias = Annotated[
    float | None, typer.Option(help="Seconds between an answer and a user's next request.", rich_help_panel=_ASK)
]
DurationOption: TypeAlias = Annotated[
    float | None, typer.Option(help="Send for so many seconds, then wait for what runs.", rich_help_panel=_ASK)
]
LimitOption: TypeAlias = Annotated[
    int | None, typer.Option(help="Only the first N requests of the trace.", rich_help_panel=_ASK)
]
ScaleOption: TypeAlias = Annotated[
    float | None,
    typer.Option(help="Multiply the trace's lengths (0.03125: blocks of 512 tokens have 16).", rich_help_panel=_ASK),
]
OutputOption: TypeAlias = Annotated[int | None, typer.Option(help="Tokens of an answer at most.", rich_help_panel=_ASK)]
LeaveOutOption: TypeAlias = Annotated[
    bool,
    typer.Option("--leave-out-long", help="Leave out what is longer than the model's context.", rich_help_panel=_ASK),
]
SeedOption: TypeAlias = Annotated[
    int | None, typer.Option(help="Another number makes all texts others: a cold cache.", rich_help_panel=_ASK)
]
TimeoutOption: TypeAlias = Annotated[
    float | None, typer.Option(help="Seconds that one request may take. Default: 300.", rich_help_panel=_ASK)
]
SloTtftOption: TypeAlias = Annotated[
    float | None, typer.Option(help="Goal for the first token, seconds.", rich_help_panel=_REPORT)
]
SloItlOption: TypeAlias = Annotated[
    float | None, typer.Option(help="Goal for the mean time between tokens, seconds.", rich_help_panel=_REPORT)
]
PriceOption: TypeAlias = Annotated[
    float | None, typer.Option("--gpu-hour-usd", help="What an instance costs an hour.", rich_help_panel=_REPORT)
]
InstancesOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        help="How many instances cost that. Default: as many as the gateway can use.", rich_help_panel=_REPORT
    ),
]
OutOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="Write report.json, report.md and report.png to this folder.", rich_help_panel=_REPORT),
]
