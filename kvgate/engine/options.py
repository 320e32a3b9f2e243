"""The options of ``kvgate engine``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvcontrol.core.roles import EngineRole
from kvgate.engine.shared_options import SharedOptions
from kvgate.failure import CommandError
from kvgate.host.ports import LOOPBACK, free_ports, need_free


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(SharedOptions):
    """Each field is an option as it was typed; None where one wasn't."""

    context: typer.Context
    model: Annotated[Path, typer.Option(help="A Hugging Face model folder.")]
    model_name: Annotated[str | None, typer.Option(help="Model name for clients. Default: the folder's name.")] = None
    host: Annotated[str, typer.Option(help="Address that the HTTP server listens on.")] = LOOPBACK
    port: Annotated[int | None, typer.Option(help="HTTP port. Default: a free port, printed.")] = None
    events_port: Annotated[int | None, typer.Option(help="Port of the KV events (ZMQ PUB). Default: a free port.")] = (
        None
    )
    replay_port: Annotated[
        int | None, typer.Option(help="Port that replays KV events (ZMQ ROUTER). Default: a free port.")
    ] = None
    events_host: Annotated[
        str,
        typer.Option(
            help="Address of both event ports; * is every address, for a gateway on another host. They have no "
            "authentication."
        ),
    ] = LOOPBACK
    context_length: Annotated[
        int | None, typer.Option(min=1, help="Context length: most tokens of a prompt with its answer.")
    ] = None
    role: Annotated[
        EngineRole,
        typer.Option(
            case_sensitive=False,
            help="Role: prefill (computes prompts for others), decode (answers them), or hybrid (both).",
        ),
    ] = EngineRole.HYBRID

    def ports(self) -> tuple[int, int, int]:
        """Return the ports of HTTP, events and their replay: as typed, else free ones. Raises ``CommandError`` for a
        port that is taken or given twice.
        """
        events_host = LOOPBACK if self.events_host == "*" else self.events_host
        typed = (
            ("--port", self.port, self.host),
            ("--events-port", self.events_port, events_host),
            ("--replay-port", self.replay_port, events_host),
        )
        given: dict[int, str] = {}
        for name, wanted, host in typed:
            if wanted is None:
                continue
            if wanted in given:
                raise CommandError(f"{given[wanted]} and {name} are both {wanted}; each listens on a port of its own")
            need_free(host, wanted, option=name)
            given[wanted] = name
        free = free_ports(len(typed), besides=given)
        http, events, replay = (
            other if wanted is None else wanted for (_, wanted, _), other in zip(typed, free, strict=True)
        )
        return http, events, replay
