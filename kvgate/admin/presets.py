"""``kvgate admin presets``: those that come along and your own, and what the fleet is to be."""

from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer
import yaml

from kvcontrol.core.yaml_text import load_yaml
from kvgate.admin.output import fetched, one, table_of, text_of
from kvgate.display import plain
from kvgate.failure import CommandError

Preset = Annotated[str, typer.Argument(help="A preset's name.")]


def presets() -> typer.Typer:
    """Return the commands."""
    group = typer.Typer(name="presets", help="Presets of the fleet.", no_args_is_help=True)

    @group.command("list")
    def list_presets(context: typer.Context) -> None:
        """List them, and the hardware that they can be merged with."""
        if (answer := fetched(context, "GET", "/presets")) is None:
            return
        table_of(answer["data"], ("name", "shipped", "summary"))
        plain(f"hardware: {', '.join(answer['hardware'])}")

    @group.command("apply")
    def apply(
        context: typer.Context,
        name: Annotated[str, typer.Argument(help="Name as in presets list.")],
        hardware: Annotated[str, typer.Argument(help="Name as in presets list.")],
    ) -> None:
        """Apply a preset to the fleet, and list the settings that need a restart, by instance."""
        if (answer := fetched(context, "PUT", "/presets/current", {"name": name, "hardware": hardware})) is None:
            return
        plain(f"sent: {', '.join(f'{key} {text_of(value)}' for key, value in answer['hot'].items())}")
        rows = [
            {"instance": instance, "needs a restart for": key, "has": value["present"], "preset": value["wanted"]}
            for instance, each in answer["restart"].items()
            for key, value in each.items()
        ]
        table_of(rows, ("instance", "needs a restart for", "has", "preset"))

    @group.command("show")
    def show_preset(context: typer.Context, name: Preset) -> None:
        """Print a preset as it is written: the beginning of one of your own."""
        if (answer := fetched(context, "GET", f"/presets/{quote(name, safe='')}")) is not None:
            plain(yaml.safe_dump(answer["form"], sort_keys=False, allow_unicode=True).rstrip())

    @group.command("put")
    def put(
        context: typer.Context,
        name: Preset,
        file: Annotated[Path, typer.Argument(help="File in the format of presets show: YAML or JSON.")],
    ) -> None:
        """Make a preset of your own, or write it anew."""
        one(context, "PUT", f"/presets/{quote(name, safe='')}", _form_in(file))

    @group.command("remove")
    def remove(context: typer.Context, name: Preset) -> None:
        """Take a preset of your own away."""
        one(context, "DELETE", f"/presets/{quote(name, safe='')}")

    return group


def _form_in(file: Path) -> dict[str, object]:
    try:
        form = load_yaml(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CommandError(f"{file}: cannot be read: {error}") from error
    if not isinstance(form, dict):
        raise CommandError(f"{file}: the file contains no preset", "kvgate admin presets show prints the format")
    return form
