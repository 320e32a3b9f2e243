"""The options of ``kvgate up``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvcontrol.core.roles import KVTransport
from kvgate.engine.shared_options import ENGINES, SharedOptions
from kvgate.host.paths import state_dir
from kvgate.host.ports import LOOPBACK
from kvgate.up.api_keys import chosen_keys
from kvgate.up.stack import GatewayOptions, Routing

DEFAULT_PORT = 8000

_MODEL = "Model"
_GATEWAY = "Gateway"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions(SharedOptions):
    """Each field is an option as it was typed; None where one wasn't."""

    model: Annotated[
        Path | None,
        typer.Option(
            help="Hugging Face model folder. Default: SmolLM2-135M-Instruct, downloaded once.", rich_help_panel=_MODEL
        ),
    ] = None
    tiny: Annotated[
        bool,
        typer.Option(
            "--tiny", help="Use a tiny random Llama: ready in seconds, answers are nonsense.", rich_help_panel=_MODEL
        ),
    ] = False
    model_name: Annotated[
        str | None, typer.Option(help="Model name for clients. Default: the folder's name.", rich_help_panel=_MODEL)
    ] = None
    instances: Annotated[int | None, typer.Option(help="Number of engines. Default: 2.", rich_help_panel=ENGINES)] = (
        None
    )
    topology: Annotated[
        str,
        typer.Option(
            help="Roles: hybrid, pd (one prefill and one decode instance), or counts such as 1p1d, 1p2d, 2p1d.",
            rich_help_panel=ENGINES,
        ),
    ] = "hybrid"
    pd_transport: Annotated[
        KVTransport | None,
        typer.Option(
            help="Transport from prefill to decode instances: migration, or tiers (--ddr). Default: tiers if "
            "configured.",
            rich_help_panel=ENGINES,
        ),
    ] = None
    host: Annotated[
        str, typer.Option(envvar="KVGATE_HOST", help="Address that the gateway listens on.", rich_help_panel=_GATEWAY)
    ] = LOOPBACK
    port: Annotated[int, typer.Option(envvar="KVGATE_PORT", help="Port of the gateway.", rich_help_panel=_GATEWAY)] = (
        DEFAULT_PORT
    )
    routing: Annotated[Routing, typer.Option(help="Routing policy.", rich_help_panel=_GATEWAY)] = Routing.COST_AWARE
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="A key that clients must present: KEY or TENANT:KEY. Repeatable. None: any key, on loopback only. "
            "Other users see it in the process list; prefer --api-key-file or KVGATE_API_KEYS.",
            rich_help_panel=_GATEWAY,
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File with such keys, one per line, readable only by you.", rich_help_panel=_GATEWAY),
    ] = None
    state: Annotated[
        Path | None,
        typer.Option(
            "--state-dir",
            envvar="KVGATE_STATE_DIR",
            help="Folder for durable state and logs. Default: ~/.local/state/kvgate.",
            rich_help_panel=_GATEWAY,
        ),
    ] = None

    @property
    def gateway(self) -> GatewayOptions:
        """How the gateway listens and routes. Raises ``CommandError`` for keys that can't be read."""
        return GatewayOptions(
            host=self.host,
            port=self.port,
            api_keys=chosen_keys(self.api_key or (), self.api_key_file),
            routing=self.routing,
            state_dir=self.state or state_dir(),
        )
