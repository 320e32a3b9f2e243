"""``kvgate admin``: the common calls to a running gateway's admin API."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Final
from urllib.parse import quote

import typer

from kvgate.admin.address import GATEWAY_URL, GatewayUrl
from kvgate.admin.anywhere import AnywhereGroup
from kvgate.admin.client import AdminClient, OvertakenError, find_key
from kvgate.admin.fleet import explain, instances, routing
from kvgate.admin.keys import Name, Note, keys
from kvgate.admin.output import (
    AdminKey,
    Operator,
    StateFolder,
    fetched,
    listed,
    one,
    operator_of,
    show,
    table_of,
)
from kvgate.admin.prefixes import prefixes
from kvgate.admin.presets import presets
from kvgate.display import plain
from kvgate.failure import CommandError
from kvgate.host.paths import state_dir

_HELP: Final = "Manage a running gateway."


def build_admin() -> typer.Typer:
    """Return the commands."""
    admin = typer.Typer(name="admin", cls=AnywhereGroup, help=_HELP, no_args_is_help=True)
    admin.callback()(_connect)
    admin.add_typer(_tenants())
    admin.add_typer(keys())
    admin.add_typer(_quotas())
    admin.add_typer(_policies())
    admin.add_typer(presets())
    admin.add_typer(prefixes())
    admin.add_typer(instances())
    admin.add_typer(routing())
    admin.command("explain")(explain)
    admin.command("audit")(_audit)
    admin.command("reset")(_reset)
    return admin


def _connect(
    context: typer.Context,
    *,
    url: GatewayUrl = GATEWAY_URL,
    admin_key: AdminKey = None,
    state: StateFolder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON only.")] = False,
) -> None:
    """Manage tenants, keys, quotas and policies of a running gateway."""
    context.obj = Operator(connect=lambda: AdminClient(url, find_key(admin_key, state or state_dir())), as_json=as_json)


def _tenants() -> typer.Typer:
    tenants = typer.Typer(name="tenants", help="Tenants of the gateway.", no_args_is_help=True)

    @tenants.command("list")
    def list_tenants(context: typer.Context) -> None:
        """List them, and those of the settings' keys."""
        if (answer := fetched(context, "GET", "/tenants")) is None:
            return
        known = {each["id"] for each in answer["data"]}
        rows = [{**each, "from": "store"} for each in answer["data"]]
        rows += [
            {"id": each, "from": "settings", "suspended": False, "note": None, "version": None}
            for each in answer.get("configured", ())
            if each not in known
        ]
        table_of(rows, ("id", "from", "suspended", "note", "version"))

    @tenants.command("add")
    def add(context: typer.Context, name: Name, note: Note = "") -> None:
        """Make a tenant; one that exists is left alone and is an error."""
        try:
            one(context, "PUT", f"/tenants/{quote(name, safe='')}", {"note": note}, {"if-none-match": "*"})
        except OvertakenError:
            raise CommandError(
                f"tenant {name!r} exists", f"kvgate admin keys add {name} adds a key; tenants list shows all"
            ) from None

    @tenants.command("suspend")
    def suspend(context: typer.Context, name: Name) -> None:
        """Refuse a tenant's requests from now on."""
        _merge(context, f"/tenants/{quote(name, safe='')}", {"suspended": True}, ("note", "suspended"))

    @tenants.command("resume")
    def resume(context: typer.Context, name: Name) -> None:
        """Serve a suspended tenant again."""
        _merge(context, f"/tenants/{quote(name, safe='')}", {"suspended": False}, ("note", "suspended"))

    @tenants.command("remove")
    def remove(context: typer.Context, name: Name) -> None:
        """Forget a tenant and its quota, and revoke its keys."""
        one(context, "DELETE", f"/tenants/{quote(name, safe='')}")

    return tenants


def _quotas() -> typer.Typer:
    quotas = typer.Typer(name="quotas", help="Quotas of tenants.", no_args_is_help=True)

    @quotas.command("list")
    def list_quotas(context: typer.Context) -> None:
        """List them."""
        shown = ("tenant", "requests_per_min", "tokens_per_min", "concurrency", "context_tokens", "priority", "slo")
        listed(context, "/quotas", (*shown, "weight", "kv"))

    @quotas.command("show")
    def show(context: typer.Context, tenant: Name) -> None:
        """Show one."""
        one(context, "GET", f"/quotas/{quote(tenant, safe='')}")

    @quotas.command("usage")
    def usage(context: typer.Context, tenant: Name) -> None:
        """Show what counts against it now."""
        one(context, "GET", f"/quotas/{quote(tenant, safe='')}/usage")

    @quotas.command("remove")
    def remove(context: typer.Context, tenant: Name) -> None:
        """Take it back."""
        one(context, "DELETE", f"/quotas/{quote(tenant, safe='')}")

    @quotas.command("set")
    def change(  # noqa: PLR0913 - each is one option
        context: typer.Context,
        tenant: Name,
        *,
        requests_per_min: Annotated[int | None, typer.Option(help="0 removes the limit.")] = None,
        tokens_per_min: Annotated[int | None, typer.Option(help="0 removes the limit.")] = None,
        concurrency: Annotated[int | None, typer.Option(help="0 removes the limit.")] = None,
        context_tokens: Annotated[int | None, typer.Option(help="0 removes the limit.")] = None,
        priority: Annotated[str | None, typer.Option(help="high, normal or low.")] = None,
        slo: Annotated[str | None, typer.Option(help="interactive, standard or batch.")] = None,
        weight: Annotated[float | None, typer.Option(help="Weight among waiting tenants.")] = None,
        kv: Annotated[
            list[str] | None,
            typer.Option(help="TIER=GUARANTEED:BURST in bytes, for example DDR=0:1000000; BURST may be all."),
        ] = None,
    ) -> None:
        """Change what is given and leave the rest; _default is for tenants without a quota of their own."""
        counts = {
            "requests_per_min": requests_per_min,
            "tokens_per_min": tokens_per_min,
            "concurrency": concurrency,
            "context_tokens": context_tokens,
        }
        changed: dict[str, Any] = {name: value or None for name, value in counts.items() if value is not None}
        others = {"priority": priority, "slo": slo, "weight": weight}
        changed |= {name: value for name, value in others.items() if value is not None}
        if kv:
            changed["kv"] = dict(map(_budget, kv))
        if not changed:
            raise CommandError("no option sets a value", "kvgate admin quotas set --help lists the options")
        fields = (*counts, "priority", "slo", "weight", "kv")
        _merge(context, f"/quotas/{quote(tenant, safe='')}", changed, fields, make=True)

    return quotas


def _policies() -> typer.Typer:
    policies = typer.Typer(name="policies", help="Policies that all instances run.", no_args_is_help=True)

    @policies.command("list")
    def list_policies(context: typer.Context) -> None:
        """List what is chosen, and what each instance runs."""
        if (answer := fetched(context, "GET", "/policies")) is None:
            return
        table_of(answer["data"], ("kind", "name", "params", "version"))
        running = [
            {"instance": instance, "kind": one["kind"], "runs": one["name"], "params": one["params"]}
            for instance, each in answer["instances"].items()
            for one in each["running"]
        ]
        table_of(running, ("instance", "kind", "runs", "params"))
        for instance, each in answer["instances"].items():
            for problem in filter(None, [each["problem"], *each["problems"]]):
                plain(f"{instance}: {problem}")

    @policies.command("shadow")
    def shadow(context: typer.Context) -> None:
        """Compare the candidates of kind shadow: what each would have found in HBM, over all instances."""
        if (answer := fetched(context, "GET", "/policies/shadow")) is not None:
            table_of(answer["candidates"], ("policy", "lookups", "hits", "hit_ratio"))

    @policies.command("set")
    def change(
        context: typer.Context,
        kind: Annotated[
            str, typer.Argument(help="eviction (HBM), eviction:ddr, eviction:nvme, shadow, schedule or pace.")
        ],
        name: Annotated[
            str,
            typer.Argument(
                help="Name of the policy, for example s3fifo for eviction, fifo for schedule; for shadow a "
                "comma-separated list."
            ),
        ],
        param: Annotated[list[str] | None, typer.Option(help="Parameter NAME=VALUE; repeatable.")] = None,
    ) -> None:
        """Make all instances run a policy, or none when one refuses."""
        params = dict(map(_param, param or []))
        one(context, "PUT", f"/policies/{quote(kind, safe='')}", {"name": name, "params": params})

    return policies


def _audit(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Number of entries, newest first.")] = 20,
) -> None:
    """Show changes with their authors, newest first."""
    listed(context, f"/audit?limit={limit}", ("number", "at_s", "actor", "action", "target", "outcome"))


def _reset(
    context: typer.Context,
    instance: Annotated[list[str] | None, typer.Option(help="Only this instance; repeatable.")] = None,
) -> None:
    """Empty the prefix caches of all instances, or of some."""
    one(context, "POST", "/prefix-cache/reset", {"instances": instance or None})


def _merge(
    context: typer.Context, path: str, changed: dict[str, Any], fields: Sequence[str], *, make: bool = False
) -> None:
    """Change some fields of a document, unless somebody else changes it meanwhile."""
    operator = operator_of(context)
    try:
        found = operator.client.call("GET", path)
    except CommandError:
        if not make:
            raise
        show(operator, operator.client.call("PUT", path, changed, {"if-none-match": "*"}).body)
        return
    body = {name: found.body[name] for name in fields} | changed
    show(operator, operator.client.call("PUT", path, body, {"if-match": found.etag or "*"}).body)


def _budget(text: str) -> tuple[str, dict[str, int | None]]:
    tier, _, sizes = text.partition("=")
    guaranteed, _, burst = sizes.partition(":")
    try:
        return tier, {"guaranteed_bytes": int(guaranteed), "burst_bytes": None if burst == "all" else int(burst)}
    except ValueError:
        raise CommandError(
            f"--kv {text} is not TIER=GUARANTEED:BURST", "write for example DDR=0:1000000 or NVME=4096:all"
        ) from None


def _param(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise CommandError(f"--param {text} is not NAME=VALUE", "write for example --param small=0.1")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
