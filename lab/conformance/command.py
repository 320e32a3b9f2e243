"""``kvgate conformance``: does a gateway keep what its clients rely on?"""

import asyncio
import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from kvgate.display import errors, output, write_out
from kvgate.failure import CommandError
from kvgate.host.ports import free_ports
from kvgate.renamed import renamed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lab.conformance.case import Case
    from lab.conformance.runner import Outcome

_PAIR = 2


@renamed({"--target": "--url"})
def conformance(  # noqa: PLR0913 - each is one option
    *,
    target: Annotated[str | None, typer.Option("--url", help="The gateway to ask, like http://127.0.0.1:8000.")] = None,
    own: Annotated[bool, typer.Option("--self", help="Start our own gateway before the mock backends.")] = False,
    backends: Annotated[
        str, typer.Option(help="Ports of 127.0.0.1 on which the target expects its two backends.")
    ] = "9001,9002",
    pid: Annotated[
        int | None, typer.Option(help="The target's process, for the cases that stop it: they run last.")
    ] = None,
    only: Annotated[str | None, typer.Option(help="Run the cases whose id contains this.")] = None,
    wait_s: Annotated[float, typer.Option(min=1, help="Seconds for the target to find its backends.")] = 120.0,
    list_cases: Annotated[bool, typer.Option("--list", help="Print all cases.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Test a gateway from outside: bodies, errors, streams, hostile bytes, load, failures.

    Two scripted backends are started here; the target is any OpenAI-compatible gateway that has them as its backends
    for the model mock-model. Exits with 1 when a case is broken.
    """
    from lab.conformance.own import own_gateway
    from lab.conformance.runner import CASES, UnreachableError, run

    if list_cases and as_json:
        write_out(json.dumps([{"id": each.id, "about": each.about, "seen": each.seen} for each in CASES], indent=2))
        return
    if list_cases:
        for each in CASES:
            output.print(f"{each.id:30} {each.about} (seen: {each.seen})", markup=False, soft_wrap=True)
        return
    cases = _chosen(CASES, only, may_stop=own or pid is not None)
    if (target is None) == (not own):
        raise CommandError("give either --url URL or --self", "--self starts our own gateway")

    def say(line: str) -> None:
        errors.print(f"  {line}", markup=False, soft_wrap=True)

    with ExitStack() as stack:
        if own:
            ports = free_ports(_PAIR)
            quick = {"body_timeout_s": "10", "header_timeout_s": "10", "shutdown_grace_s": "3"}
            target, pid = stack.enter_context(own_gateway(ports, **quick))
        else:
            ports = _ports(backends)
        try:
            outcomes = asyncio.run(run(target or "", ports, cases=cases, wait_s=wait_s, say=say, pid=pid))
        except UnreachableError as error:
            raise CommandError(str(error), "start the target with these two backends") from error
        except OSError as error:
            raise CommandError(
                f"the mock backends can't listen: {error}", "choose other ports with --backends"
            ) from error
    _show(outcomes, as_json=as_json)
    if not all(each.ok for each in outcomes):
        raise typer.Exit(1)


def _chosen(cases: "Sequence[Case]", only: str | None, *, may_stop: bool) -> "list[Case]":
    """Return the cases whose id contains ``only``; those that end the target where that is known. Raises
    ``CommandError`` where there are none.
    """
    chosen = [each for each in cases if (only is None or only in each.id) and (may_stop or not each.ends_target)]
    if not chosen:
        advice = "kvgate conformance --list names them; those that stop the target need --self or --pid"
        raise CommandError(f"--only {only}: no case has that in its id", advice)
    return chosen


def _ports(said: str) -> list[int]:
    parts = [part.strip() for part in said.split(",")]
    if len(parts) != _PAIR or not all(part.isdigit() for part in parts):
        raise CommandError(f"--backends {said}: two ports are needed, like 9001,9002", "say on which ports to listen")
    return [int(part) for part in parts]


def _show(outcomes: "list[Outcome]", *, as_json: bool) -> None:
    failed = sum(not each.ok for each in outcomes)
    if as_json:
        cases = [{"id": each.id, "ok": each.ok, "why": each.why} for each in outcomes]
        write_out(json.dumps({"passed": len(outcomes) - failed, "failed": failed, "cases": cases}, indent=2))
        return
    output.print(f"{len(outcomes) - failed} hold, {failed} are broken")
