"""A command that is known by its name and summary until it is called; the call imports its module."""

from collections.abc import Callable, Mapping
from typing import Any

import typer
from typer.core import MarkupMode, TyperCommand
from typer.main import get_group

from kvgate.failure import CommandError
from kvgate.renamed import RenamingCommand

Command = typer.Typer | Callable[..., None]


class LazyCommand(TyperCommand):
    """Stands in a group for a command that ``load`` returns: a function with typer's annotations or a ``typer.Typer``.

    The context of a call is the command's own, so options, help and shell completion are, too.
    """

    def __init__(  # noqa: PLR0913 - called at two places, by name
        self,
        name: str,
        summary: str,
        load: Callable[[], Command],
        *,
        markup: MarkupMode,
        panel: str,
        settings: Mapping[str, Any] | None = None,
        advice: str = "",
    ) -> None:
        """``settings`` are those of typer's ``command``; ``advice`` is for a command that cannot be imported."""
        self._load = load
        self._settings = settings or {}
        self._advice = advice
        super().__init__(name, help=summary, add_help_option=False, rich_help_panel=panel, rich_markup_mode=markup)

    @property
    def loaded(self) -> Any:
        """The command itself. Raises ``CommandError`` where its package cannot be imported."""
        try:
            command = self._load()
        except (ImportError, AttributeError) as error:
            raise CommandError(f"kvgate {self.name} cannot be loaded: {error}", self._advice) from error
        app = typer.Typer(add_completion=False, rich_markup_mode=self.rich_markup_mode)
        name = self.name or ""
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name, cls=RenamingCommand, **self._settings)(command)
        return get_group(app).commands[name]

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Return the context of the command itself."""
        return self.loaded.make_context(info_name, args, parent, **extra)


def summary_of(load: Callable[[], Command]) -> str:
    """Return the first line of a function's docstring, which describes the command that the function returns."""
    return (load.__doc__ or "").strip().partition("\n")[0]
