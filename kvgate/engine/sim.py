"""``kvgate sim``: become one simulated engine; its own command line has the options."""

import typer

from kvgate.programs import become


def sim(context: typer.Context) -> None:
    """Run one simulated engine: an instance that computes nothing and takes as long as one that does.

    kvgate sim --help lists its options.
    """
    become("sim", context.args)
