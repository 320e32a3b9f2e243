"""What all commands of an operator share: which gateway with which key, who calls, and how an answer is shown."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.table import Column, Table

from kvgate.admin_client import AdminClient
from kvgate.display import output, plain

GATEWAY_URL: Final = "http://127.0.0.1:8000"
GatewayUrl = Annotated[str, typer.Option(envvar="KVGATE_URL", help="Where the gateway listens.")]
AdminKey = Annotated[str | None, typer.Option(envvar="KVGATE_ADMIN_KEY", help="Default: the key in the state folder.")]
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
        raise RuntimeError("the group's callback has not run")
    return found


def one(
    context: typer.Context, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> None:
    """Make one call and show its answer."""
    operator = operator_of(context)
    show(operator, operator.client.call(method, path, body, headers).body)


def show(operator: Operator, said: Any) -> None:
    """Show an answer, field by field or as JSON."""
    if operator.as_json:
        plain(json.dumps(said))
    elif said is None:
        plain("done")
    else:
        for name, value in said.items():
            plain(f"{name}: {text_of(value)}")


def told(context: typer.Context, method: str, path: str, body: Any = None) -> Any:
    """Make one call and return its answer for whoever shows it; None where it has been printed as JSON already."""
    operator = operator_of(context)
    said = operator.client.call(method, path, body).body
    if operator.as_json:
        plain(json.dumps(said))
        return None
    return said


def listed(context: typer.Context, path: str, columns: Sequence[str]) -> None:
    """Show a list of the API as a table or as JSON."""
    if (said := told(context, "GET", path)) is not None:
        table_of(said["data"], columns)


def table_of(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    """Print rows as a table."""
    table = Table(*(Column(each, overflow="fold") for each in columns), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(text_of(row[column]) for column in columns))
    output.print(table)


def text_of(value: Any) -> str:
    """Return a value as people read it."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)


__all__ = [
    "GATEWAY_URL",
    "AdminKey",
    "GatewayUrl",
    "Operator",
    "StateFolder",
    "listed",
    "one",
    "operator_of",
    "show",
    "table_of",
    "text_of",
    "told",
]
