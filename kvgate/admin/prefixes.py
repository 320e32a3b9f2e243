"""``kvgate admin prefixes``: what stays cached whatever comes, and what is to be forgotten."""

import json
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from kvgate.admin.fleet import messages_in
from kvgate.admin.output import fetched, table_of, text_of
from kvgate.display import plain
from kvgate.failure import CommandError

Model = Annotated[str, typer.Argument(help="Model of the prompt.")]
Prompt = Annotated[str | None, typer.Option(help="Prompt as text, as for completions.")]
Messages = Annotated[Path | None, typer.Option(help="A JSON file with a list of chat messages.")]
Block = Annotated[str | None, typer.Option(help="Hash of the last block in hex, instead of a prompt.")]
Tenant = Annotated[str, typer.Option(help="Tenant of the prompt.")]
Instances = Annotated[list[str] | None, typer.Option("--instance", help="Only this instance; repeatable.")]


def prefixes() -> typer.Typer:
    """Return the commands."""
    group = typer.Typer(name="prefixes", help="Pinned prefixes, which no policy evicts.", no_args_is_help=True)
    group.command("list")(_list_pins)
    group.command("pin")(_pin)
    group.command("unpin")(_unpin)
    group.command("invalidate")(_invalidate)
    return group


def _list_pins(context: typer.Context) -> None:
    """List pins, where their blocks are, and what instances have room for."""
    if (answer := fetched(context, "GET", "/prefixes")) is None:
        return
    rows = [
        {**pin, "instance": name, **place, "left_s": _rounded(pin["left_s"])}
        for pin in answer["data"]
        for name, place in pin["instances"].items()
    ]
    table_of(
        rows,
        ("id", "model", "tenant", "tokens", "left_s", "instance", "outcome", "tiers", "missing_blocks", "note"),
    )
    room = [{"instance": name, **each} for name, each in answer["instances"].items()]
    table_of(room, ("instance", "pinned_blocks", "limit_blocks", "problem"))
    _reasons({f"{pin['id']} {name}": place for pin in answer["data"] for name, place in pin["instances"].items()})


def _pin(  # noqa: PLR0913 - each is one option
    context: typer.Context,
    *,
    model: Model,
    prompt: Prompt = None,
    messages: Messages = None,
    block: Block = None,
    tenant: Tenant = "anonymous",
    instance: Instances = None,
    ttl_s: Annotated[float | None, typer.Option(help="Seconds until the pin expires. Default: never.")] = None,
    note: Annotated[str, typer.Option(help="Note for operators.")] = "",
) -> None:
    """Keep a prefix where it is held, or on the instances that are named."""
    body = _prefix(model, prompt, messages, block) | {"tenant": tenant, "instances": instance or None}
    answer = fetched(context, "POST", "/prefixes", body | {"ttl_s": ttl_s, "note": note})
    if answer is not None:
        plain(f"id: {answer['id']}")
        _places(answer)


def _unpin(
    context: typer.Context, pin_id: Annotated[str, typer.Argument(help="Id of a pin, as in prefixes list.")]
) -> None:
    """Keep it no longer; its blocks go as others do."""
    if (answer := fetched(context, "DELETE", f"/prefixes/{quote(pin_id, safe='')}")) is not None:
        _places(answer)


def _invalidate(  # noqa: PLR0913 - each is one option
    context: typer.Context,
    *,
    model: Model,
    prompt: Prompt = None,
    messages: Messages = None,
    block: Block = None,
    tenant: Tenant = "anonymous",
    instance: Instances = None,
) -> None:
    """Forget a prompt, or a block by its hash, with all that follows, in all tiers."""
    body = _prefix(model, prompt, messages, block) | {"tenant": tenant, "instances": instance or None}
    if (answer := fetched(context, "POST", "/prefixes/invalidate", body)) is None:
        return
    rows = [{"instance": name, **each} for name, each in answer["instances"].items()]
    table_of(rows, ("instance", "outcome", "dropped", "in_use_blocks"))
    _reasons(answer["instances"])
    if answer["unpinned"]:
        plain(f"unpinned: {', '.join(answer['unpinned'])}")


def _prefix(model: str, prompt: str | None, messages: Path | None, block: str | None) -> dict[str, Any]:
    if sum(each is not None for each in (prompt, messages, block)) != 1:
        raise CommandError(
            "no prefix, or more than one, is given", "pass exactly one of --prompt, --messages and --block"
        )
    return {
        "model": model,
        "prompt": prompt,
        "messages": None if messages is None else messages_in(messages),
        "hash": block,
    }


def _places(answer: Any) -> None:
    table_of(
        [{"instance": name, **each} for name, each in answer["instances"].items()],
        ("instance", "outcome", "tiers", "missing_blocks"),
    )
    _reasons(answer["instances"])


def _reasons(places: dict[str, Any]) -> None:
    for name, each in places.items():
        if each["reason"]:
            plain(f"{name}: {each['outcome']}: {text_of(each['reason'])}")


def _rounded(seconds: float | None) -> str:
    return "-" if seconds is None else json.dumps(round(seconds))
