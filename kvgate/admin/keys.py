"""``kvgate admin keys``: API keys, and what the first and the last of them mean."""

import json
import time
from typing import Annotated, Any
from urllib.parse import quote

import typer

from kvgate.admin.client import AdminClient
from kvgate.admin.output import fetched, one, operator_of, table_of
from kvgate.display import note, plain

Name = Annotated[str, typer.Argument(help="A tenant's name.")]
Note = Annotated[str, typer.Option(help="Note for operators.")]


def keys() -> typer.Typer:
    """Return the commands."""
    group = typer.Typer(name="keys", help="API keys.", no_args_is_help=True)
    group.command("list")(_list_keys)
    group.command("add")(_add)
    group.command("revoke")(_revoke)
    return group


def _list_keys(
    context: typer.Context, tenant: Annotated[str | None, typer.Option(help="Only keys of this tenant.")] = None
) -> None:
    """List them; never the keys themselves."""
    where = "" if tenant is None else f"?tenant={quote(tenant, safe='')}"
    if (answer := fetched(context, "GET", f"/keys{where}")) is None:
        return
    rows = [{**each, "from": "store"} for each in answer["data"]]
    unknown = dict.fromkeys(("id", "note", "expires_at_s", "revoked_at_s"))
    rows += [{**unknown, "tenant": each, "from": "settings"} for each in answer.get("configured", ())]
    table_of(rows, ("id", "tenant", "from", "note", "expires_at_s", "revoked_at_s"))


def _add(
    context: typer.Context,
    tenant: Name,
    note_for_operators: Annotated[str, typer.Option("--note", help="Note for operators.")] = "",
    expires_in_s: Annotated[float | None, typer.Option(help="Seconds until the key expires.")] = None,
) -> None:
    """Make a key and print it, this once. The first key of all ends that any key is accepted."""
    operator = operator_of(context)
    client = operator.client
    was_open = client.call("GET", "/status").body["open"]
    body = {"tenant": tenant, "note": note_for_operators, "expires_in_s": expires_in_s}
    made = client.call("POST", "/keys", body).body
    if operator.as_json:
        plain(json.dumps(made))
    else:
        plain(made["key"])
    if was_open:
        note(
            "This is the first key: from now on the gateway refuses requests without a known key with 401, for good. "
            "Until now it accepted any key."
        )


def _revoke(
    context: typer.Context, key_id: Annotated[str, typer.Argument(help="Id of a key, as in keys list.")]
) -> None:
    """Refuse a key from now on."""
    one(context, "DELETE", f"/keys/{quote(key_id, safe='')}")
    if not _any_valid(operator_of(context).client):
        note(
            "No valid key is left: the gateway refuses every request with 401 until you add a key with kvgate admin "
            "keys add."
        )


def _any_valid(client: AdminClient) -> bool:
    answer: dict[str, Any] = client.call("GET", "/keys").body
    now_s = time.time()
    stored = any(
        each["revoked_at_s"] is None and (each["expires_at_s"] is None or each["expires_at_s"] > now_s)
        for each in answer["data"]
    )
    return stored or bool(answer.get("configured"))
