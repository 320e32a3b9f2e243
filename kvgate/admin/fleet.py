"""``kvgate admin instances``, ``routing`` and ``explain``: who is in the fleet, and where prompts go."""

import json
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from kvgate.admin.output import fetched, listed, one, table_of
from kvgate.display import plain
from kvgate.failure import CommandError

Id = Annotated[str, typer.Argument(help="An instance's id.")]


def instances() -> typer.Typer:
    """Return the commands about instances."""
    group = typer.Typer(name="instances", help="Instances of the fleet.", no_args_is_help=True)

    @group.command("list")
    def list_instances(context: typer.Context) -> None:
        """List them, and how they are."""
        listed(context, "/instances", ("id", "url", "source", "state", "draining", "breaker", "in_flight", "models"))

    @group.command("show")
    def show(context: typer.Context, name: Id) -> None:
        """Show all that is known of one."""
        one(context, "GET", _path(name))

    @group.command("add")
    def add(
        context: typer.Context,
        name: Id,
        url: Annotated[str, typer.Argument(help="Address of the instance, for example http://10.0.0.7:9001.")],
    ) -> None:
        """Take one in: it is used once it is healthy."""
        one(context, "POST", "/instances", {"id": name, "url": url})

    @group.command("drain")
    def drain(context: typer.Context, name: Id) -> None:
        """Give one nothing new; what it has goes on."""
        one(context, "POST", _path(name) + "/drain")

    @group.command("resume")
    def resume(context: typer.Context, name: Id) -> None:
        """Give a drained one requests again."""
        one(context, "POST", _path(name) + "/resume")

    @group.command("remove")
    def remove(context: typer.Context, name: Id) -> None:
        """Take out one that was added here; it finishes what it has."""
        one(context, "DELETE", _path(name))

    return group


def routing() -> typer.Typer:
    """Return the commands about routing."""
    group = typer.Typer(name="routing", help="Routing policy of the gateway.", no_args_is_help=True)

    @group.command("show")
    def show(context: typer.Context) -> None:
        """Show the policy and its assumptions."""
        one(context, "GET", "/routing")

    @group.command("set")
    def change(
        context: typer.Context,
        policy: Annotated[
            str, typer.Argument(help="Name of the policy, for example cost_aware; show lists the names.")
        ],
        spread: Annotated[float | None, typer.Option(help="Weight of recently assigned work.")] = None,
    ) -> None:
        """Choose by another policy from now on; what is known of caches stays."""
        one(context, "PUT", "/routing", {"policy": policy, "spread": spread})

    @group.command("reset")
    def reset(context: typer.Context) -> None:
        """Go back to what the settings say."""
        one(context, "DELETE", "/routing")

    return group


def explain(  # noqa: PLR0913 - each is one option
    context: typer.Context,
    *,
    model: Annotated[str, typer.Argument(help="Model of the request.")],
    prompt: Annotated[str | None, typer.Option(help="Prompt as text, as for completions.")] = None,
    messages: Annotated[Path | None, typer.Option(help="A JSON file with a list of chat messages.")] = None,
    block: Annotated[
        list[str] | None, typer.Option(help="Hash of a block in hex; repeat for each block, in order.")
    ] = None,
    tenant: Annotated[str, typer.Option(help="Tenant of the prompt.")] = "anonymous",
) -> None:
    """Explain the routing decision for a prompt."""
    body: dict[str, Any] = {"model": model, "tenant": tenant, "prompt": prompt, "hashes": block or None}
    if messages is not None:
        body["messages"] = messages_in(messages)
    if (answer := fetched(context, "POST", "/explain", body)) is None:
        return
    table_of(
        [
            {
                "instance": ("* " if each["chosen"] else "  ") + each["instance"],
                "matched": each["matched_tokens"],
                "expected": each["expected_tokens"],
                "in_flight": each["in_flight"],
                "ttft_s": _seconds(each["predicted_ttft_s"]),
                "cost_s": _seconds(each["total_s"]),
                "terms": " ".join(f"{name}={value:.3f}" for name, value in each["cost_s"].items()),
            }
            for each in answer["candidates"]
        ],
        ("instance", "matched", "expected", "in_flight", "ttft_s", "cost_s", "terms"),
    )
    for each in answer["left_out"]:
        plain(f"left out {each['instance']}: {each['why']}")
    plain(
        f"{answer['policy']}: {answer['instance'] or 'nowhere'}, {answer['reason']} (known by {answer['fingerprint']})"
    )


def messages_in(path: Path) -> Any:
    """Return what a JSON file holds; raises ``CommandError``."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(
            f"{path} is not a JSON file: {error}", "the file must contain a list of chat messages"
        ) from None


def _path(name: str) -> str:
    return f"/instances/{quote(name, safe='')}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
