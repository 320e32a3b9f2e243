"""Commands of other packages: found through the entry-point group ``kvgate.commands``, imported when they are called.

An entry point is a function without parameters. The first line of its docstring is the command's line in ``kvgate
--help``; it returns the command itself, a function with typer's annotations or a ``typer.Typer``. The module of the
function must be quick to import, as ``kvgate --help`` imports it.
"""

from importlib.metadata import EntryPoint, entry_points
from typing import Final

from typer.core import MarkupMode

from kvgate.failure import CommandError
from kvgate.lazy import Command, LazyCommand, summary_of

GROUP: Final = "kvgate.commands"
PANEL: Final = "Measure and plan"
"""Heading of these commands in ``kvgate --help``."""
_ADVICE: Final = "reinstall kvgate: make setup in a checkout, pip install elsewhere"


def extensions(markup: MarkupMode) -> dict[str, LazyCommand]:
    """Return the installed commands of other packages by name. It reads the metadata of every installed package."""
    return {entry.name: _command(entry, markup) for entry in sorted(entry_points(group=GROUP))}


def none_installed(name: str) -> CommandError:
    """Return the refusal of an unknown command where the group is empty: the installation is older than the code."""
    return CommandError(f"unknown command {name!r}; no command of the entry-point group {GROUP} is installed", _ADVICE)


def _command(entry: EntryPoint, markup: MarkupMode) -> LazyCommand:
    def load() -> Command:
        found: Command = entry.load()()
        return found

    return LazyCommand(entry.name, _summary(entry), load, markup=markup, panel=PANEL, advice=_ADVICE)


def _summary(entry: EntryPoint) -> str:
    try:
        return summary_of(entry.load())
    except (ImportError, AttributeError) as error:
        return f"Not available: {error}"
