"""``kvgate bench host``: does the host of an engine keep up with it?"""

from pathlib import Path
from typing import Annotated

import typer

from kvgate.display import errors
from kvgate.engine.model import embedded_model, model_from_folder, tiny_model
from kvgate.failure import CommandError
from lab.bench.engine import host_report as host
from lab.bench.options import AsJson, AsMarkdown, say
from lab.show import show


def run_host(  # noqa: PLR0913 - each is one option
    *,
    model: Annotated[Path | None, typer.Option(help="A model folder. Default: the embedded model.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="A tiny random Llama instead.")] = False,
    prompt_tokens: Annotated[int, typer.Option(min=64, help="Length of the long prompt.")] = 60_000,
    streams: Annotated[int, typer.Option(min=1, help="Streams that get a token of each step.")] = 16,
    starts: Annotated[
        bool, typer.Option("--starts", help="Start a stack twice, warm and cold, and time its first requests too.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Time few calls: to see that it runs.")] = False,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """Prompts, texts and streams on an engine's host, LMDeploy's way and kvgate's; and first requests after a start."""
    from lab.bench.engine.host import HostPlan

    if tiny and model is not None:
        raise CommandError("--tiny and --model exclude each other")
    if tiny:
        served = tiny_model(console=errors)
    else:
        served = embedded_model(console=errors) if model is None else model_from_folder(model, None)
    plan = HostPlan(folder=served.folder, prompt_tokens=prompt_tokens, streams=streams)
    if quick:
        plan = HostPlan(
            folder=served.folder, prompt_tokens=prompt_tokens, streams=streams, answer_tokens=20, steps=5, repeats=1
        )
    show(host.run(plan, served if starts else None, say), as_json=as_json, as_markdown=as_markdown)
