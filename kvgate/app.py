"""The command line: lists the commands and finds one by its name; what a command is made of it imports itself."""

from functools import cached_property
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvgate import __version__
from kvgate.charset import locale_is_utf8
from kvgate.commands import COMMANDS
from kvgate.failure import INTERRUPTED
from kvgate.lazy import LazyCommand, summary_of

_ENVIRONMENT = (
    "Environment: KVGATE_URL (the gateway that admin, top, register and bench revisit ask), KVGATE_ADMIN_KEY, "
    "KVGATE_API_KEY, KVGATE_STATE_DIR, KVGATE_CACHE_DIR, KVGATE_PORT_RANGE (FIRST-LAST: ports for engines). kvgate "
    "gateway --help lists the gateway's own."
)


def _print_version(value: bool) -> None:  # noqa: FBT001 - typer's form of a callback
    if value:
        from kvgate.display import plain

        plain(f"kvgate {__version__}")
        raise typer.Exit


def _root(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


class _Commands(TyperGroup):
    """The product's commands and, behind them, those of other packages; reports the interruption by Ctrl-C."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for panel, load, settings in COMMANDS:
            name = load.__name__
            self.commands[name] = LazyCommand(
                name, summary_of(load), load, markup=self.rich_markup_mode, panel=panel, settings=settings
            )

    @cached_property
    def _extended(self) -> bool:
        """Whether there are commands of other packages; asking adds them."""
        from kvgate.extensions import extensions

        found = extensions(self.rich_markup_mode)
        self.commands.update(found)
        return bool(found)

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return super().list_commands(ctx) if self._extended else list(self.commands)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        if cmd_name not in self.commands and not self._extended:
            from kvgate.extensions import none_installed

            raise none_installed(cmd_name)
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            from kvgate.display import errors

            errors.print("[bold red]kvgate:[/] interrupted")
            raise typer.Exit(INTERRUPTED) from None


def build_app() -> typer.Typer:
    """Return the command line."""
    app = typer.Typer(
        name="kvgate",
        cls=_Commands,
        help="An OpenAI-compatible, KV-aware gateway for LMDeploy.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog=_ENVIRONMENT,
        rich_markup_mode="rich" if locale_is_utf8() else None,  # its frames are not ASCII
    )
    app.callback()(_root)
    return app
