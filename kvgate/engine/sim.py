"""``kvgate sim``: become one simulated engine; its own command line has the options."""

import os
import sys

import typer


def sim(context: typer.Context) -> None:
    """Run one simulated engine: an instance that computes nothing and takes as long as one that does.

    kvgate sim --help lists its options.
    """
    os.execv(sys.executable, (sys.executable, "-m", "engines.sim", *context.args))  # noqa: S606 - the process goes on
