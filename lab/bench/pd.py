"""What separation is for: how long running answers stand still while long prompts arrive.

Three instances of one model: one that prefills, two that do whole requests (in the decode role, so that all three are
without a prefix cache). Two of them work at a time, with the same answers running and the same long prompts coming in:

    hybrid      both whole ones; answers and prompts in turn to each
    separated   the prefill instance computes the prompts, one whole one goes on with them and runs all the answers

Both do every round, one after the other, so that whatever else the machine does falls on both. Times between two
tokens of an answer count from the first long prompt's arrival to the last one's answer.

Or the same through two gateways that are there (``PdGateways``), best over the same engines: then who computes what is
their affair.
"""

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import msgspec

from kvcontrol.core.control import STATS_PATH, InstanceStats
from kvcontrol.core.errors import UNREADABLE
from kvcontrol.core.pd import PD_HEADER, Fetch, Hold, new_ticket
from kvgate.boards import StartBoard
from kvgate.display import errors
from kvgate.engine.instance import EngineLimits
from kvgate.engine.model import Model
from kvgate.host.paths import make_socket_dir, remove_socket_dir
from kvgate.host.ports import reserved_ports
from kvgate.supervision.probe import HttpProbe
from kvgate.supervision.supervisor import Supervisor
from kvgate.up.stack import PORTS_PER_INSTANCE, engine_specs, plan_instances
from kvgate.up.topology import Topology
from lab.bench.timed_chat import BenchmarkError, first_model
from lab.driver.stream import StreamReader
from lab.driver.summary import quantile
from lab.report import Host, Report

NAME = "pd"
_LIMIT_S = 300.0
_LETTERS = "bcdfghjklmnpqrstvwxz"
_LONGEST_ANSWER = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class PdGateways:
    """URLs of a gateway that separates prefill and decode, and of one that doesn't."""

    separated: str
    hybrid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PdPlan:
    """``answers`` run while ``prompts`` of ``prompt_tokens`` or so arrive, one every ``period_s``; ``rounds`` times.

    ``on``: a model, of which three instances are started, or gateways that are there.
    """

    on: Model | PdGateways
    answers: int = 4
    prompts: int = 6
    prompt_tokens: int = 3000
    period_s: float = 0.5
    rounds: int = 3
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """Where a request goes: ``prefill`` first, if anywhere, then ``answer``."""

    answer: str
    prefill: str | None = None
    source: tuple[str, int] = ("", 0)


@dataclass(slots=True)
class _Readings:
    gaps_s: list[float] = field(default_factory=list)
    ttfts_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """What requests are sent with, and where each way sends them."""

    session: aiohttp.ClientSession
    model: str
    ways: Mapping[str, tuple[_Way, ...]]


def run(plan: PdPlan, say: Callable[[str], None]) -> Report:
    """Measure; raises ``BenchmarkError`` when an instance fails a request."""
    try:
        found = asyncio.run(_run(plan, say))
    except BaseExceptionGroup as group:  # what ran beside the failed request was cancelled with it
        failed = group.subgroup(BenchmarkError)
        if failed is None:
            raise
        raise _first(failed) from group
    metrics: dict[str, float] = {}
    for name, readings in found.items():
        metrics |= {
            f"{name}_itl_p50_ms": 1e3 * statistics.median(readings.gaps_s),
            f"{name}_itl_p99_ms": 1e3 * quantile(sorted(readings.gaps_s), 0.99),
            f"{name}_itl_max_ms": 1e3 * max(readings.gaps_s),
            f"{name}_long_ttft_p50_ms": 1e3 * statistics.median(readings.ttfts_s),
            f"{name}_itl_samples": len(readings.gaps_s),
        }
    metrics["itl_p99_improvement_ratio"] = metrics["hybrid_itl_p99_ms"] / metrics["separated_itl_p99_ms"]
    return Report(bench=NAME, host=Host.here(), metrics=metrics)


async def _run(plan: PdPlan, say: Callable[[str], None]) -> dict[str, _Readings]:
    found = {"hybrid": _Readings(), "separated": _Readings()}
    dice = random.Random(plan.seed)  # noqa: S311 - texts, no secrets
    async with _bench(plan, say) as bench:
        for turn in range(plan.rounds + 1):
            for name in bench.ways:
                say(f"{'warm-up' if not turn else f'round {turn} of {plan.rounds}'}: {name}")
                readings = await _round(bench, name, replace(plan, prompts=plan.prompts if turn else 2), dice)
                if turn:
                    found[name].gaps_s += readings.gaps_s
                    found[name].ttfts_s += readings.ttfts_s
    return found


@asynccontextmanager
async def _bench(plan: PdPlan, say: Callable[[str], None]) -> AsyncIterator[_Bench]:
    async with aiohttp.ClientSession() as session:
        if isinstance(plan.on, PdGateways):
            models = [await first_model(session, url) for url in (plan.on.separated, plan.on.hybrid)]
            if models[0] != models[1]:
                raise BenchmarkError(f"the gateways serve {models[0]} and {models[1]}; it must be one model")
            ways: dict[str, tuple[_Way, ...]] = {
                "hybrid": (_Way(answer=plan.on.hybrid),),
                "separated": (_Way(answer=plan.on.separated),),
            }
            yield _Bench(session=session, model=models[0], ways=ways)
            return
        async with _instances(plan, plan.on, say) as (prefill, first, second):
            apart = _Way(answer=first, prefill=prefill, source=await _source(session, prefill))
            ways = {"hybrid": (_Way(answer=first), _Way(answer=second)), "separated": (apart,)}
            yield _Bench(session=session, model=plan.on.name, ways=ways)


async def _round(bench: _Bench, name: str, plan: PdPlan, dice: random.Random) -> _Readings:
    """Run the answers, let the prompts arrive, and return what was seen meanwhile."""
    readings = _Readings()
    ways = bench.ways[name]
    all_run, over = asyncio.Semaphore(0), asyncio.Event()
    watched = asyncio.Event()

    async def answer(way: _Way) -> None:
        last_s: float | None = None
        async for at_s in _tokens(bench, way.answer, text=_text(dice, 20), max_tokens=_LONGEST_ANSWER, headers={}):
            if last_s is None:
                all_run.release()
            elif watched.is_set():
                readings.gaps_s.append(at_s - last_s)
            last_s = at_s
            if over.is_set():
                return

    async def prompt(number: int) -> None:
        await asyncio.sleep(number * plan.period_s)
        readings.ttfts_s.append(await _long(bench, ways[number % len(ways)], _text(dice, plan.prompt_tokens)))

    async with asyncio.TaskGroup() as group:
        for number in range(plan.answers):
            # Short ones go where they are answered; nobody prefills for them.
            group.create_task(answer(ways[number % len(ways)]))
        for _ in range(plan.answers):
            await all_run.acquire()
        watched.set()
        async with asyncio.TaskGroup() as arriving:
            for number in range(plan.prompts):
                arriving.create_task(prompt(number))
        over.set()
    return readings


async def _long(bench: _Bench, way: _Way, text: str) -> float:
    """Return the time to the first token of a long prompt."""
    began_s, headers = time.monotonic(), {}
    if way.prefill is not None:
        ticket = new_ticket()
        holding = {PD_HEADER: str(Hold(ticket=ticket))}
        async for _ in _tokens(bench, way.prefill, text=text, max_tokens=2, headers=holding):
            pass
        headers = {PD_HEADER: str(Fetch(ticket=ticket, host=way.source[0], port=way.source[1]))}
    first_s = None
    async for at_s in _tokens(bench, way.answer, text=text, max_tokens=2, headers=headers):
        first_s = first_s or at_s
    if first_s is None:
        raise BenchmarkError(f"{way.answer} answered a long prompt with nothing")
    return first_s - began_s


async def _tokens(
    bench: _Bench, url: str, *, text: str, max_tokens: int, headers: dict[str, str]
) -> AsyncIterator[float]:
    """Yield the time at which each event of a streamed answer came; leaving early ends the request."""
    body = {
        "model": bench.model,
        "prompt": text,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    timeout = aiohttp.ClientTimeout(total=_LIMIT_S)
    try:
        async with bench.session.post(f"{url}/v1/completions", json=body, headers=headers, timeout=timeout) as answer:
            if answer.status != 200:  # noqa: PLR2004 - OK
                raise BenchmarkError(f"{url} answered {answer.status}: {(await answer.text())[:300]}")
            stream = StreamReader()
            async for line in answer.content:
                for event in stream.events(line):
                    if event.error is not None:
                        raise BenchmarkError(f"{url} failed mid-stream: {event.error}")
                    if failed := event.failed_with:
                        raise BenchmarkError(f"{url} ended an answer with {failed!r}")
                    yield time.monotonic()
    except UNREADABLE as error:
        raise BenchmarkError(f"{url} streamed what is no event: {error}") from error
    except (aiohttp.ClientError, OSError) as error:
        raise BenchmarkError(f"{url}: {error}") from error


async def _source(session: aiohttp.ClientSession, url: str) -> tuple[str, int]:
    """Return where a prefill instance hands prompts over."""
    async with session.get(url + STATS_PATH) as answer:
        stats = msgspec.json.decode(await answer.read(), type=InstanceStats)
    if stats.pd is None or not stats.pd.endpoint:
        raise BenchmarkError(f"{url} hands no prompts over")
    host, _, port = stats.pd.endpoint.rpartition(":")
    return host, int(port)


@asynccontextmanager
async def _instances(plan: PdPlan, model: Model, say: Callable[[str], None]) -> AsyncIterator[list[str]]:
    """Start one prefill and two decode instances, one thread each, and give their URLs."""
    roles = Topology.parse("1p2d")
    limits = EngineLimits(cpu_threads=1, kv_blocks=2048, context_tokens=_LONGEST_ANSWER + 2 * plan.prompt_tokens)
    sockets = make_socket_dir(os.getpid())
    try:
        with (
            tempfile.TemporaryDirectory(prefix="kvgate-bench-") as logs,
            reserved_ports(PORTS_PER_INSTANCE * len(roles.roles)) as ports,
        ):
            planned = plan_instances(model, ports, (), limits, sockets, topology=roles)
            say(f"starting {len(planned)} x {model.name}")
            specs = engine_specs(planned)
            async with HttpProbe() as probe, Supervisor([specs], Path(logs), probe, StartBoard(errors)) as children:
                await children.until_ready()
                yield [each.url for each in planned]
    finally:
        with suppress(OSError):
            remove_socket_dir(sockets)


def _text(dice: random.Random, letters: int) -> str:
    """A text of about one token a letter for models whose tokens are bytes and syllables."""
    return "".join(dice.choices(_LETTERS, k=letters))


def _first(group: BaseExceptionGroup[BenchmarkError]) -> BenchmarkError:
    """Return one of the errors in a group that has no others."""
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
