"""The ``kvgate`` command: wires one file per command, and turns a refusal into a message and exit code 1."""

import sys

import typer
from typer.core import TyperGroup

from kvgate.admin import build_admin
from kvgate.display import errors, locale_is_utf8, show_failure
from kvgate.doctor import doctor
from kvgate.engine import engine
from kvgate.failure import CommandError
from kvgate.gateway import gateway
from kvgate.register import register
from kvgate.sim import sim
from kvgate.top import top
from kvgate.up import INTERRUPTED, up
from lab.bench.command import build_bench
from lab.conformance.command import conformance
from lab.plan.command import plan
from lab.replay.command import replay
from lab.simulate.command import simulate

_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


class _Commands(TyperGroup):
    """Says of a command that Ctrl-C ended that it was interrupted; typer would end it without a word."""

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
        add_completion=False,
        rich_markup_mode="rich" if locale_is_utf8() else None,  # its frames are not ASCII
    )
    app.command(rich_help_panel="Run")(up)
    app.command(context_settings={"allow_extra_args": True}, rich_help_panel="Run")(engine)
    app.command(context_settings=_PASSED_ON, add_help_option=False, rich_help_panel="Run")(gateway)
    app.command(context_settings=_PASSED_ON, add_help_option=False, rich_help_panel="Run")(sim)
    app.command(rich_help_panel="Run")(register)
    app.add_typer(build_admin(), rich_help_panel="Run")
    app.command(rich_help_panel="Look")(conformance)
    app.command(rich_help_panel="Look")(doctor)
    app.command(rich_help_panel="Look")(plan)
    app.command(rich_help_panel="Look")(replay)
    app.command(rich_help_panel="Look")(simulate)
    app.command(rich_help_panel="Look")(top)
    app.add_typer(build_bench(), rich_help_panel="Look")
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
