"""``kvgate bench served`` and ``kvgate bench attention``: their options."""

import shlex
import tempfile
from dataclasses import astuple
from pathlib import Path
from typing import Annotated

import typer

from kvcontrol.core.quantisation import KVQuantisation
from kvgate.display import errors
from kvgate.engine.model import model_from_folder, tiny_model
from kvgate.failure import CommandError
from lab.bench.options import AsJson, AsMarkdown, KVQuant, say
from lab.bench.served import run as served
from lab.bench.served.subjects import Peer, Pool
from lab.report import Grid, Host, Report
from lab.show import show

_TINY_BLOCKS = 96
_TINY_DDR = "64MiB"


def run_served(  # noqa: PLR0913 - each is one option
    *,
    model: Annotated[Path | None, typer.Option(help="A model folder.")] = None,
    trace: Annotated[Path | None, typer.Option(help="A trace, as kvgate replay takes it.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="The tiny model and a small trace: a minute on a CPU.")] = False,
    users: Annotated[int, typer.Option(min=1, help="Users who ask one request after the other.")] = 6,
    duration: Annotated[
        float | None, typer.Option(min=1.0, help="Seconds for each subject. Default: 90, tiny 8.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Requests of the trace that are used.")] = 400,
    kv_blocks: Annotated[
        int | None, typer.Option(min=16, help="KV blocks of each engine. Default: the engine's choice.")
    ] = None,
    ddr: Annotated[
        str | None, typer.Option(help="Host memory below our engine's pool, like 60GiB; none: no tiers.")
    ] = None,
    max_batch_size: Annotated[int, typer.Option(min=1, help="Requests that an engine runs at once.")] = 16,
    instances: Annotated[int, typer.Option(min=1, help="Engines of ours behind the gateway, one for each GPU.")] = 1,
    subjects: Annotated[str, typer.Option(help="Stacks to start, one after the other.")] = ",".join(served.SUBJECTS),
    peers: Annotated[
        list[str] | None, typer.Option("--peer", help="NAME=URL of a server that runs already; repeatable.")
    ] = None,
    up_options: Annotated[str, typer.Option(help="More options of kvgate up for ours, as in a shell.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Another seed, other texts.")] = 0,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """A recorded trace in a closed loop: our stack, stock LMDeploy and other servers, the same requests each."""
    if tiny and (model is not None or trace is not None):
        raise CommandError("--tiny brings its own model and trace: leave --model and --trace out")
    if not tiny and (model is None or trace is None):
        raise CommandError("--model and --trace are needed", "or --tiny, which brings both")
    with tempfile.TemporaryDirectory(prefix="kvgate-served-") as folder:
        plan = served.ServedPlan(
            model=tiny_model(console=errors) if model is None else model_from_folder(model, None),
            trace=served.small_trace(Path(folder)) if trace is None else trace,
            users=min(users, 3) if tiny else users,
            duration_s=duration or (8.0 if tiny else 90.0),
            limit=limit,
            pool=Pool(
                kv_blocks=kv_blocks or (_TINY_BLOCKS if tiny else None),
                max_batch_size=min(max_batch_size, 8) if tiny else max_batch_size,
                ddr=(_TINY_DDR if tiny else None) if ddr is None else ddr,
                instances=instances,
            ),
            subjects=tuple(name.strip() for name in subjects.split(",") if name.strip()),
            peers=tuple(Peer.parse(each) for each in peers or ()),
            up_options=tuple(shlex.split(up_options)),
            seed=seed,
        )
        show(served.run(plan, say), as_json=as_json, as_markdown=as_markdown)


def run_attention(  # noqa: PLR0913 - each is one option
    *,
    heads: Annotated[int, typer.Option(min=1, help="Query heads of a layer.")] = 28,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads of a layer.")] = 4,
    head_dim: Annotated[int, typer.Option(min=16, help="Numbers of a head; a power of two.")] = 128,
    kv_quant: KVQuant = KVQuantisation.NONE,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """Attention kernels on this GPU: LMDeploy's decode kernel beside ours, short prompts over long histories."""
    from lab.bench.engine import attention

    if heads % kv_heads or head_dim & (head_dim - 1):
        raise CommandError(
            f"--heads {heads} --kv-heads {kv_heads} --head-dim {head_dim}: heads must be a multiple of KV heads, "
            "and a head's numbers a power of two"
        )
    if kv_quant in {KVQuantisation.INT4, KVQuantisation.INT8}:
        raise CommandError(
            f"--kv-quant {kv_quant}: kvgate has no kernel for it, and LMDeploy's serves",
            "allowed: none, fp8, fp8_e5m2",
        )
    shape = attention.Shape(heads=heads, kv_heads=kv_heads, dim=head_dim)
    not_run = {}
    try:
        decode = attention.decode_times(shape, kv_quant)
    except attention.UnavailableError as error:
        raise CommandError(f"attention can't be measured: {error}", "run it on a machine with a CUDA GPU") from error
    try:
        prompts = attention.prompt_times(shape)
    except attention.UnavailableError as error:
        prompts, not_run["prompts"] = [], str(error)
    unequal = next(each for each in decode if len(set(each.lengths)) == len(each.lengths) > 2)  # noqa: PLR2004
    show(
        Report(
            bench="attention",
            host=Host.here(),
            metrics={
                "decode_unequal_ours_us": unequal.ours_us,
                "decode_unequal_stock_us": unequal.stock_us,
                "decode_unequal_ours_over_stock_ratio": unequal.ours_us / unequal.stock_us,
            },
            grids=(
                Grid(
                    name="decode, one layer",
                    columns=("contexts", "stock_us", "ours_us", "ours_gb_per_s", "difference"),
                    rows=tuple((", ".join(map(str, each.lengths)), *astuple(each)[1:]) for each in decode),
                ),
                Grid(
                    name="prompts, one layer",
                    columns=("tokens", "history_tokens", "unsplit_us", "split_us"),
                    rows=tuple(astuple(each) for each in prompts),
                ),
            ),
            not_run=not_run,
        ),
        as_json=as_json,
        as_markdown=as_markdown,
    )
