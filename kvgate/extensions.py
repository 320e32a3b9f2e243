"""Commands of other packages: found through the entry-point group ``kvgate.commands``, imported when they are called.

An entry point is a function without parameters. The first line of its docstring is the command's line in ``kvgate
--help``; it returns the command itself, a function with typer's annotations or a ``typer.Typer``. The module of the
function must be quick to import, as ``kvgate --help`` imports it.
"""

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

import typer
from typer.core import MarkupMode, TyperCommand
from typer.main import get_group

from kvgate.failure import CommandError

GROUP: Final = "kvgate.commands"
PANEL: Final = "Measure and plan"
"""Heading of these commands in ``kvgate --help``."""
_ADVICE: Final = "reinstall kvgate: make setup in a checkout, pip install elsewhere"


class ExtensionCommand(TyperCommand):
    """A command of another package by name and summary; calling it imports its code."""

    def __init__(self, entry: EntryPoint, markup: MarkupMode) -> None:
        self._entry = entry
        self._markup = markup
        super().__init__(entry.name, help=_summary(entry), add_help_option=False, rich_help_panel=PANEL)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Return the context of the command itself. Raises ``CommandError`` where its package can't be imported."""
        try:
            build: Callable[[], typer.Typer | Callable[..., None]] = self._entry.load()
        except (ImportError, AttributeError) as error:
            raise CommandError(f"kvgate {self.name} cannot be loaded: {error}", _ADVICE) from error
        app = typer.Typer(add_completion=False, rich_markup_mode=self._markup)
        command = build()
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=self._entry.name)
        else:
            app.command(self._entry.name)(command)
        return get_group(app).commands[self._entry.name].make_context(info_name, args, parent, **extra)


def extensions(markup: MarkupMode) -> dict[str, ExtensionCommand]:
    """Return the installed commands of other packages by name. It reads the metadata of every installed package."""
    return {entry.name: ExtensionCommand(entry, markup) for entry in sorted(entry_points(group=GROUP))}


def none_installed(name: str) -> CommandError:
    """Return the refusal of an unknown command where the group is empty: the installation is older than the code."""
    return CommandError(f"unknown command {name!r}; no command of the entry-point group {GROUP} is installed", _ADVICE)


def _summary(entry: EntryPoint) -> str:
    try:
        text = entry.load().__doc__ or ""
    except (ImportError, AttributeError) as error:
        return f"Not available: {error}"
    return str(text).strip().partition("\n")[0]
