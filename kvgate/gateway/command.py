"""``kvgate gateway``: become the gateway process; its own command line has the options."""

import typer

from kvgate.programs import become


def gateway(context: typer.Context) -> None:
    """Run the gateway: OpenAI-compatible HTTP in front of the engines.

    Settings come from KVGATE_* variables and --config FILE; kvgate gateway --help lists them.
    """
    become("gateway", context.args)
