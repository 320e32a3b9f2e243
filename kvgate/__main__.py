"""The ``kvgate`` command: wires one file per command, and turns a refusal into a message and exit code 1."""

import sys
from functools import cached_property
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvgate import __version__
from kvgate.admin.command import build_admin
from kvgate.display import errors, locale_is_utf8, plain, show_failure
from kvgate.doctor import doctor
from kvgate.engine.command import engine
from kvgate.engine.sim import sim
from kvgate.extensions import extensions, none_installed
from kvgate.failure import CommandError
from kvgate.gateway.command import gateway
from kvgate.gateway.register import register
from kvgate.top.command import top
from kvgate.up.command import INTERRUPTED, up

_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


_ENVIRONMENT = (
    "Environment: KVGATE_URL (the gateway that admin and top ask), KVGATE_ADMIN_KEY, KVGATE_API_KEY, KVGATE_STATE_DIR, "
    "KVGATE_CACHE_DIR, KVGATE_PORT_RANGE (FIRST-LAST: ports for engines). kvgate gateway --help lists the gateway's "
    "own."
)


def _print_version(value: bool) -> None:  # noqa: FBT001 - typer's form of a callback
    if value:
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

    @cached_property
    def _extended(self) -> bool:
        """Whether there are commands of other packages; asking adds them."""
        found = extensions(self.rich_markup_mode)
        self.commands.update(found)
        return bool(found)

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return super().list_commands(ctx) if self._extended else list(self.commands)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        if cmd_name not in self.commands and not self._extended:
            raise none_installed(cmd_name)
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
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
    app.command(rich_help_panel="Run")(up)
    app.command(context_settings={"allow_extra_args": True}, rich_help_panel="Run")(engine)
    app.command(context_settings=_PASSED_ON, add_help_option=False, rich_help_panel="Run")(gateway)
    app.command(context_settings=_PASSED_ON, add_help_option=False, rich_help_panel="Run")(sim)
    app.command(rich_help_panel="Run")(register)
    app.add_typer(build_admin(), rich_help_panel="Run")
    app.command(rich_help_panel="Look")(doctor)
    app.command(rich_help_panel="Look")(top)
    return app


def main() -> None:
    """Run one command and exit."""
    try:
        build_app()(prog_name="kvgate")
    except CommandError as error:
        show_failure(error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
