"""``kvgate bench steps`` and ``kvgate bench overtaking``: their options."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvcontrol.core.quantisation import KVQuantisation
from kvgate.display import errors
from kvgate.engine.model import Model, model_from_folder, tiny_model
from kvgate.failure import CommandError
from lab.bench.engine import overtaking, steps
from lab.bench.options import AsJson, AsMarkdown, KVQuant
from lab.show import show

_FOLDER = Annotated[Path | None, typer.Option(help="A model folder.")]
_TINY = Annotated[bool, typer.Option("--tiny", help="The tiny model and short prompts: a minute on a CPU.")]


def run_steps(
    *,
    model: _FOLDER = None,
    tiny: _TINY = False,
    kv_quant: KVQuant = KVQuantisation.NONE,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """Decode steps of a whole engine and first tokens of short and of cached prompts: stock LMDeploy and kvgate."""
    plan = steps.StepsPlan(model=str(_model(model, tiny=tiny).folder), kv_quantisation=kv_quant)
    if tiny:
        plan = replace(
            plan, contexts=((100, 300, 900), (400,) * 3), hit_tokens=1_000, answer_tokens=40, block_tokens=16
        )
    show(steps.run(plan), as_json=as_json, as_markdown=as_markdown)


def run_overtaking(  # noqa: PLR0913 - each is one option
    *,
    model: _FOLDER = None,
    tiny: _TINY = False,
    long_tokens: Annotated[int, typer.Option(min=64, help="Tokens of the long cold prompt.")] = 60_000,
    context_tokens: Annotated[int, typer.Option(min=64, help="Cached tokens of the revisit.")] = 55_000,
    new_tokens: Annotated[int, typer.Option(min=16, help="Tokens of the revisit that are not cached.")] = 5_000,
    chunk_tokens: Annotated[int, typer.Option(min=16, help="Tokens that one prefill step computes at most.")] = 2_048,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds after one to warm up.")] = 5,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """A revisit with few tokens left beside a long cold prompt: what does it wait, with and without overtaking?"""
    plan = overtaking.OvertakingPlan(
        model=str(_model(model, tiny=tiny).folder),
        long_tokens=long_tokens,
        context_tokens=context_tokens,
        new_tokens=new_tokens,
        chunk_tokens=chunk_tokens,
        rounds=rounds,
    )
    if tiny:
        plan = replace(
            plan, long_tokens=3_000, context_tokens=2_000, new_tokens=300, chunk_tokens=128, block_tokens=16, rounds=3
        )
    show(overtaking.run(plan), as_json=as_json, as_markdown=as_markdown)


def _model(folder: Path | None, *, tiny: bool) -> Model:
    if tiny is not (folder is None):
        raise CommandError("--model or --tiny is needed, not both")
    return tiny_model(console=errors) if folder is None else model_from_folder(folder, None)
