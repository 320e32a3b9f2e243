"""Options that have new names: the old ones are read, and a line on standard error gives the new one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import typer
from typer.core import TyperCommand

_ATTRIBUTE: Final = "_kvgate_renamed"
_Run = TypeVar("_Run", bound=Callable[..., None])


def renamed(options: Mapping[str, str]) -> Callable[[_Run], _Run]:
    """Return a decorator for a command's function: ``{"--old": "--new"}``."""

    def decorate(command: _Run) -> _Run:
        setattr(command, _ATTRIBUTE, dict(options))
        return command

    return decorate


def deprecated(old: str, new: str) -> None:
    """Print that something old was read, and what to write."""
    typer.echo(f"kvgate: {old} is deprecated: use {new}", err=True)


class RenamingCommand(TyperCommand):
    """A command that reads the old names of its options. Help and completion have the new ones alone."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse with new names in the place of old ones."""
        names: Mapping[str, str] = getattr(self.callback, _ATTRIBUTE, {})
        return super().parse_args(ctx, _with_new_names(args, names) if names else args)


def _with_new_names(args: Sequence[str], names: Mapping[str, str]) -> list[str]:
    found = list(args)
    end = found.index("--") if "--" in found else len(found)
    for place, word in enumerate(found[:end]):
        name, equals, value = word.partition("=")
        if name in names:
            deprecated(name, names[name])
            found[place] = f"{names[name]}{equals}{value}"
    return found
