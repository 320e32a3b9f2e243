"""Where commands find the gateway that they talk to."""

from typing import Annotated, Final

import typer

GATEWAY_URL: Final = "http://127.0.0.1:8000"
GatewayUrl = Annotated[str, typer.Option("--url", envvar="KVGATE_URL", help="Address of the gateway.")]
