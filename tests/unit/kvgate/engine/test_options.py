"""The ports of an engine: as typed, else free, and never one for two purposes."""

from pathlib import Path

import click
import pytest
import typer

from kvgate.engine.options import EngineOptions
from kvgate.failure import CommandError
from kvgate.host.ports import PORT_RANGE_VARIABLE, free_ports


def options(**ports: int) -> EngineOptions:
    return EngineOptions(context=typer.Context(click.Command("engine")), model=Path("model"), **ports)


def test_no_port_is_chosen_that_was_given_for_another_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    first = next(each for each in free_ports(64) if each <= 65500)
    monkeypatch.setenv(PORT_RANGE_VARIABLE, f"{first}-{first + 11}")
    for _ in range(30):
        given = free_ports(1)[0]
        http, events, replay = options(port=given).ports()
        assert http == given
        assert len({http, events, replay}) == 3


def test_one_port_for_two_purposes_is_refused_by_name() -> None:
    (port,) = free_ports(1)
    with pytest.raises(CommandError, match=f"--port and --replay-port are both {port}"):
        options(port=port, replay_port=port).ports()
