"""Shared parts of the admin commands: the gateway and its key, one call, and the output of an answer."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.table import Table
from rich.text import Text

from kvgate.admin.client import AdminClient
from kvgate.display import plain, print_table

_ROUNDED: Final = 1000
AdminKey = Annotated[
    str | None, typer.Option(envvar="KVGATE_ADMIN_KEY", help="Admin key. Default: the key in the state folder.")
]
StateFolder = Annotated[
    Path | None, typer.Option("--state-dir", envvar="KVGATE_STATE_DIR", help="The gateway's state folder.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """Who calls, and how they want the answer. The key is looked for with the first call: help needs none."""

    connect: Callable[[], AdminClient]
    as_json: bool

    @property
    def client(self) -> AdminClient:
        """The gateway; raises ``CommandError`` where there is no key or the address is none."""
        return self.connect()


def operator_of(context: typer.Context) -> Operator:
    """Return who was connected by the group's callback."""
    found = context.find_object(Operator)
    if found is None:
        raise RuntimeError("the options of kvgate admin were not parsed")
    return found


def one(
    context: typer.Context, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> None:
    """Make one call and show its answer."""
    operator = operator_of(context)
    show(operator, operator.client.call(method, path, body, headers).body)


def show(operator: Operator, answer: Any) -> None:
    """Show an answer, field by field or as JSON."""
    if operator.as_json:
        plain(json.dumps(answer))
    elif answer is None:
        plain("done")
    else:
        for name, value in answer.items():
            plain(f"{_heading(name)}: {_cell(name, value)}")


def fetched(context: typer.Context, method: str, path: str, body: Any = None) -> Any:
    """Make one call and return its answer for whoever shows it; None where it has been printed as JSON already."""
    operator = operator_of(context)
    answer = operator.client.call(method, path, body).body
    if operator.as_json:
        plain(json.dumps(answer))
        return None
    return answer


def listed(context: typer.Context, path: str, columns: Sequence[str]) -> None:
    """Show a list of the API as a table or as JSON."""
    if (answer := fetched(context, "GET", path)) is not None:
        table_of(answer["data"], columns)


def table_of(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    """Print rows as a table. Cells wrap in a terminal alone: a pipe gets one line for each row.

    A column named ``..._at_s`` is shown as local time, one named ``..._s`` in seconds.
    """
    table = Table(box=None, pad_edge=False)
    for name in columns:
        values = [row[name] for row in rows]
        is_number = any(map(_is_number, values)) and not name.endswith("_at_s")
        table.add_column(_heading(name), justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(column, row[column]) for column in columns))
    print_table(table)


def _heading(name: str) -> str:
    return name.removesuffix("_at_s").removesuffix("_s").replace("_", " ")


def text_of(value: Any) -> str:
    """Return a value as people read it: a fraction with three digits."""
    if value is None:
        return "-"
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.3g}" if abs(value) < _ROUNDED else f"{value:.0f}"
    return value if isinstance(value, str) else json.dumps(value)


def _cell(column: str, value: Any) -> Text:
    if column.endswith("_at_s") and _is_number(value):
        return Text(datetime.fromtimestamp(value).astimezone().strftime("%Y-%m-%d %H:%M:%S"))
    if column.endswith("_s") and _is_number(value):
        return Text(f"{value:.1f} s")
    return Text(text_of(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
