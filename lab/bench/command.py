"""``kvgate bench NAME``: one subcommand for each benchmark; ``--json`` prints one object and nothing else."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcontrol.core.quantisation import KVQuantisation
from kvgate.display import errors
from kvgate.engine.model import Model, embedded_model, model_from_folder, tiny_model
from kvgate.engine.units import parse_bytes
from kvgate.failure import CommandError
from kvgate.renamed import RenamingCommand, renamed
from lab.bench import revisit
from lab.bench.commands.ab import run_ab
from lab.bench.commands.fleet import run_fleet
from lab.bench.commands.host import run_host
from lab.bench.commands.live import run_live
from lab.bench.commands.policies import run_adaptive, run_evict, run_hierarchy, run_predict, run_shadow
from lab.bench.commands.served import run_attention, run_served
from lab.bench.commands.steps import run_overtaking, run_steps
from lab.bench.engine import host_report as host
from lab.bench.engine import overtaking, steps
from lab.bench.options import AsJson, AsMarkdown, KVQuant, say
from lab.bench.served import run as served
from lab.report import Host, Report
from lab.show import show

if TYPE_CHECKING:
    from lab.bench.gateway.subject import Peer


def build_bench() -> typer.Typer:
    """Return the ``bench`` command with its subcommands."""
    bench = typer.Typer(name="bench", help="Benchmarks on this machine.", no_args_is_help=True)
    bench.command(revisit.NAME)(run_revisit)
    bench.command("prefix")(run_prefix)
    bench.command("pool")(run_pool)
    bench.command("evict")(run_evict)
    bench.command("adaptive")(run_adaptive)
    bench.command("shadow")(run_shadow)
    bench.command("ab")(run_ab)
    bench.command("hierarchy")(run_hierarchy)
    bench.command("predict")(run_predict)
    bench.command("schedule")(run_schedule)
    bench.command("pd")(run_pd)
    bench.command("tiers")(run_tiers)
    bench.command(served.NAME)(run_served)
    bench.command("attention")(run_attention)
    bench.command(host.NAME)(run_host)
    bench.command(steps.NAME)(run_steps)
    bench.command(overtaking.NAME)(run_overtaking)
    bench.command("gateway", cls=RenamingCommand)(run_gateway)
    bench.command("telemetry")(run_telemetry)
    bench.command("fleet", cls=RenamingCommand)(run_fleet)
    bench.command("live", cls=RenamingCommand)(run_live)
    return bench


def run_revisit(  # noqa: PLR0913 - each is one option
    *,
    url: Annotated[str, typer.Option(envvar="KVGATE_URL", help="The gateway to measure.")] = "http://127.0.0.1:8000",
    against: Annotated[
        str | None, typer.Option(help="A second gateway, the baseline; both get the same work, turn by turn.")
    ] = None,
    conversations: Annotated[int, typer.Option(min=1, help="Chats that take turns.")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each chat.")] = 4,
    first_words: Annotated[int, typer.Option(min=1, help="Length of each first message, in words.")] = 400,
    turn_words: Annotated[int, typer.Option(min=1, help="Length of each later message, in words.")] = 30,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 16,
    seed: Annotated[int, typer.Option(help="Another seed, other texts.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Several chats take turns: what does a cached past save, and does routing find it?"""
    plan = revisit.RevisitPlan(
        conversations=conversations,
        turns=turns,
        first_words=first_words,
        turn_words=turn_words,
        max_tokens=max_tokens,
        seed=seed,
    )
    urls = [url.rstrip("/")] if against is None else [url.rstrip("/"), against.rstrip("/")]
    metrics = asyncio.run(revisit.run(urls, plan))
    show(Report(bench=revisit.NAME, host=Host.here(), metrics=metrics), as_json=as_json)


def run_prefix(  # noqa: PLR0913 - each is one option
    *,
    blocks: Annotated[int, typer.Option(min=10_000, help="KV blocks held by the fleet.")] = 1_000_000,
    instances: Annotated[int, typer.Option(min=1, help="Instances that hold them.")] = 64,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A model folder whose tokenizer to use. Default: the embedded model's.")
    ] = None,
    traces: Annotated[Path | None, typer.Option(help="A folder with mooncake/ and agentic/ traces to replay.")] = None,
    peer: Annotated[
        str | None,
        typer.Option(
            help="sglang=FOLDER, into which SGLang's wheel is unpacked (and what its radix cache imports), to race it."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Time few calls: to see that it runs.")] = False,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """Prefix look-ups, hashing, tokenization: what does it cost to know who holds a prompt's beginning?"""
    from lab.bench.prefix import report as prefix
    from lab.bench.prefix.peer import sglang_folder

    sglang = None if peer is None else sglang_folder(peer)
    for trace in prefix.TRACES:
        if traces is not None and not (traces / trace.file).is_file():
            raise CommandError(f"--traces {traces}: there is no {trace.file}", "name the folder that holds it")
    folder = tokenizer or embedded_model(console=errors).folder
    if not (folder / "tokenizer.json").is_file():
        raise CommandError(f"--tokenizer {folder}: there is no tokenizer.json", "name a model folder that has one")
    plan = prefix.PrefixPlan(
        blocks=blocks, instances=instances, tokenizer=folder, traces=traces, sglang=sglang, quick=quick
    )
    report = prefix.run(plan, say)
    show(report, as_json=as_json, as_markdown=as_markdown)


def run_pool(
    *,
    blocks: Annotated[int, typer.Option(min=4_096, help="Blocks of 64 tokens in the pool.")] = 16_384,
    traces: Annotated[
        Path | None,
        typer.Option(help="A folder with azure/, mooncake/ and agentic/ traces. Default: that beside a checkout."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Time few calls: to see that it runs.")] = False,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """A full pool of KV blocks: what does an allocation with its evictions cost, and how much memory is lost?"""
    from lab.bench.pool import report as pool
    from lab.bench.pool.measure import PoolPlan

    plan = PoolPlan(workloads=pool.workloads(traces, say), blocks=blocks, quick=quick)
    show(pool.run(plan, say), as_json=as_json, as_markdown=as_markdown)


def run_schedule(
    *,
    strategy: Annotated[str | None, typer.Option(help="Which to measure, with commas. Default: all that ship.")] = None,
    traces: Annotated[
        Path | None,
        typer.Option(help="A folder with azure/, mooncake/ and agentic/ traces. Default: that beside a checkout."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Time few calls: to see that it runs.")] = False,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """Plans over 64 instances, 1,000 and 10,000 requests waiting: what do decisions cost, and what do strategies do?"""
    from lab.bench.schedule import report as schedule

    there = schedule.all_strategies()
    names = there if strategy is None else tuple(name.strip() for name in strategy.split(",") if name.strip())
    for name in names:
        if name not in there:
            raise CommandError(f"--strategy: unknown strategy {name!r}; known: {', '.join(there)}")
    if not names:
        raise CommandError("--strategy names none", f"there are {', '.join(there)}")
    report = schedule.run(schedule.SchedulePlan(traces=traces, strategies=names, quick=quick), say)
    show(report, as_json=as_json, as_markdown=as_markdown)


def run_pd(  # noqa: PLR0913 - each is one option
    *,
    model: Annotated[Path | None, typer.Option(help="A model folder. Default: a tiny random Llama.")] = None,
    separated: Annotated[
        str | None, typer.Option(help="A gateway that separates; nothing is started. With --hybrid.")
    ] = None,
    hybrid: Annotated[str | None, typer.Option(help="One that doesn't, best over the same engines.")] = None,
    answers: Annotated[int, typer.Option(min=1, help="Answers that run meanwhile.")] = 4,
    prompts: Annotated[int, typer.Option(min=1, help="Long prompts that arrive in a round.")] = 6,
    prompt_tokens: Annotated[int, typer.Option(min=64, help="Length of each, in letters, of about a token.")] = 3000,
    period: Annotated[float, typer.Option(min=0.01, help="Seconds between two of them.")] = 0.5,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each way.")] = 3,
    seed: Annotated[int, typer.Option(help="Another seed, other prompts.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Answers run while long prompts arrive: prefill and decode apart against two instances that do both."""
    from lab.bench import pd

    if (separated is None) != (hybrid is None):
        raise CommandError("--separated and --hybrid go together: the same work is sent to both")
    if separated is not None and hybrid is not None:
        if model is not None:
            raise CommandError("--model goes with instances of its own; gateways say themselves what they serve")
        on: Model | pd.PdGateways = pd.PdGateways(separated=separated.rstrip("/"), hybrid=hybrid.rstrip("/"))
    else:
        on = tiny_model(None) if model is None else model_from_folder(model, None)
    plan = pd.PdPlan(
        on=on,
        answers=answers,
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        period_s=period,
        rounds=rounds,
        seed=seed,
    )
    report = pd.run(plan, say)
    show(report, as_json=as_json)


def run_tiers(  # noqa: PLR0913 - each is one option
    *,
    model: Annotated[Path | None, typer.Option(help="A model folder. Default: the embedded model.")] = None,
    modes: Annotated[str, typer.Option(help="Engines to run, one after the other.")] = "stock,ddr,nvme",
    contexts: Annotated[int, typer.Option(min=2, help="Contexts visited in turn.")] = 12,
    context_tokens: Annotated[
        int | None, typer.Option(min=256, help="Length of each. Default: 16384 on a GPU, 768 on a CPU.")
    ] = None,
    long_tokens: Annotated[int, typer.Option(min=0, help="Length of one long context; 0: none.")] = 0,
    rounds: Annotated[int, typer.Option(min=2, help="Visits of each context; the first is cold.")] = 3,
    kv_blocks: Annotated[
        int | None, typer.Option(min=16, help="Blocks of the engine's pool. Default: for half of the contexts.")
    ] = None,
    ddr: Annotated[
        str | None, typer.Option(help="Host memory of the tiers, like 20GiB. Default: for all contexts, half more.")
    ] = None,
    nvme_dir: Annotated[Path | None, typer.Option(help="A folder for the NVMe tier. Default: a temporary one.")] = None,
    piecewise_tokens: Annotated[
        int, typer.Option(min=0, help="LMDeploy's piecewise CUDA graphs up to so many tokens; 0: off.")
    ] = 0,
    kv_quant: KVQuant = KVQuantisation.NONE,
    seed: Annotated[int, typer.Option(help="Another seed, other prompts.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Contexts visited again after their eviction: computed again, or loaded from DDR or NVMe?"""
    from lab.bench.engine import tiers_report as tiers

    wanted = tiers.Revisits(
        model=model or embedded_model(console=errors).folder,
        modes=tuple(mode.strip() for mode in modes.split(",") if mode.strip()),
        contexts=contexts,
        context_tokens=context_tokens,
        long_tokens=long_tokens,
        rounds=rounds,
        kv_blocks=kv_blocks,
        ddr_bytes=None if ddr is None else parse_bytes(ddr, option="--ddr"),
        nvme_dir=nvme_dir,
        piecewise_tokens=piecewise_tokens,
        kv_quantisation=kv_quant,
        seed=seed,
    )
    show(Report(bench=tiers.NAME, host=Host.here(), metrics=tiers.run(wanted)), as_json=as_json)


@renamed({"--policy": "--routing"})
def run_gateway(  # noqa: PLR0913 - each is one option
    *,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            "--peer",
            help="NAME=COMMAND of a gateway to measure too, with {port} and {a} {b} {c} {d}, the ports of backends.",
        ),
    ] = None,
    routing: Annotated[str, typer.Option(help="Our routing policy.")] = "cost_aware",
    tokenizer: Annotated[
        Path | None, typer.Option(help="A model folder, to route by tokens. Default: none, by text, as peers do.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; medians are reported.")] = 3,
    requests: Annotated[int, typer.Option(min=100, help="Requests of each size in a round.")] = 3000,
    streams: Annotated[int, typer.Option(min=1, help="Streams in a round; 64 at once.")] = 320,
    quick: Annotated[bool, typer.Option("--quick", help="Send little: to see that it runs.")] = False,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """Processor time of each request and streamed piece, added latency, placement: ours and others, in turns."""
    from lab.bench.gateway import run as gateway

    plan = gateway.GatewayPlan(
        peers=[_peer(each) for each in peers or ()],
        policy=routing,
        tokenizer=tokenizer,
        repeats=1 if quick else repeats,
        requests=200 if quick else requests,
        streams=16 if quick else streams,
    )
    report = gateway.run(plan, say)
    show(report, as_json=as_json, as_markdown=as_markdown)


def run_telemetry(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Few requests: to see that it runs.")] = False,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """What metrics and the log line of a request cost the gateway: processor time for each request."""
    from lab.bench.gateway import telemetry

    plan = telemetry.TelemetryPlan(requests=200, rounds=3) if quick else telemetry.TelemetryPlan()
    show(
        Report(bench="telemetry", host=Host.here(), metrics=telemetry.run(plan)),
        as_json=as_json,
        as_markdown=as_markdown,
    )


def _peer(said: str) -> "Peer":
    from lab.bench.gateway.subject import Peer

    name, given, command = said.partition("=")
    if not given or not name.isidentifier() or "{port}" not in command:
        raise CommandError(
            f"--peer {said}: is not NAME=COMMAND with {{port}} in the command",
            "for example smg='smg launch --port {port} --worker-urls http://127.0.0.1:{a} http://127.0.0.1:{b}'",
        )
    return Peer(name=name, command=command)
