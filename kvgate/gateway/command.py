"""``kvgate gateway``: become the gateway process; its own command line has the options."""

import os
import sys

import typer


def gateway(context: typer.Context) -> None:
    """Run the gateway: OpenAI-compatible HTTP in front of the engines.

    Settings come from KVGATE_* variables and --config FILE; kvgate gateway --help lists them.
    """
    os.execv(sys.executable, (sys.executable, "-m", "gateway", *context.args))  # noqa: S606 - the same process goes on
