"""Runs ours and the peers in turns over the same work, several times, and reports the median of each."""

import asyncio
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from kvgate.host.ports import free_ports
from lab.bench.gateway.backend import paced_backend, whole_backend
from lab.bench.gateway.corpus import CORPORA, Ask, chat, conversations, mixed
from lab.bench.gateway.placement import Placed, affinity, hotspot
from lab.bench.gateway.subject import Peer, Subject, ours, peer
from lab.bench.gateway.work import in_turns, latencies, streamed, whole
from lab.bench.timed_chat import BenchmarkError
from lab.report import Grid, Host, Report

NAME = "gateway"
_OURS = "kvgate"
_SIZES = {"200b": 200, "16k": 16 << 10, "128k": 128 << 10}
_CLIENTS = 16
_CHATS = 4 * _CLIENTS
_STREAMERS = 64
_PERIOD_S = 0.010
_BACKENDS = 4
_TURNS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayPlan:
    """How much work. Medians are over ``repeats`` rounds, in each of which every gateway does everything once."""

    peers: Sequence[Peer] = ()
    policy: str = "cost_aware"
    tokenizer: Path | None = None
    repeats: int = 3
    requests: int = 3000
    streams: int = 320
    chunks: int = 64
    seed: int = 1


@dataclass(slots=True)
class _Readings:
    """Figures by gateway and name."""

    found: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, gateway: str, name: str, value: float) -> None:
        self.found.setdefault(gateway, {}).setdefault(name, []).append(value)

    def medians(self) -> dict[str, dict[str, float]]:
        return {
            gateway: {name: median(values) for name, values in named.items()} for gateway, named in self.found.items()
        }


def run(plan: GatewayPlan, say: Callable[[str], None]) -> Report:
    """Measure; raises ``BenchmarkError`` when our own gateway fails. A peer that fails is reported as not run."""
    readings = _Readings()
    not_run: dict[str, str] = {}
    corpora = _corpora(plan)
    with tempfile.TemporaryDirectory(prefix="kvgate-bench-") as made, ExitStack() as stack:
        folder = Path(made)
        whole_ports, paced_ports = tuple(free_ports(_BACKENDS)), tuple(free_ports(_BACKENDS))
        backend = stack.enter_context(whole_backend(folder, whole_ports))
        stack.enter_context(paced_backend(paced_ports, chunks=plan.chunks, period_s=_PERIOD_S))
        if backend != "nginx":
            not_run["nginx"] = f"it is not installed (Debian: apt-get install nginx-light); {backend} answered instead"
        for turn in range(plan.repeats):
            for name in [_OURS, *(each.name for each in plan.peers)]:
                if name in not_run:
                    continue
                say(f"round {turn + 1} of {plan.repeats}: {name}")
                try:
                    with _started(plan, name, folder, whole_ports) as subject:
                        _measure_whole(subject, corpora, plan, name, readings, direct=whole_ports[0])
                    with _started(plan, name, folder, paced_ports) as subject:
                        value = asyncio.run(
                            streamed(subject, clients=_STREAMERS, streams=plan.streams, chunks=plan.chunks)
                        )
                        readings.add(name, "cpu_us_per_chunk", value)
                except BenchmarkError as error:
                    if name == _OURS:
                        raise
                    not_run[name] = str(error)
    return _report(readings, not_run, backend)


def _corpora(plan: GatewayPlan) -> dict[str, Sequence[Ask]]:
    """Return all that is sent, by the name of its figure. Fewer of the long ones: they take their time."""
    chance = random.Random(plan.seed)  # noqa: S311 - texts, no secrets
    made = {
        f"cpu_us_{name}": mixed(chance, size, plan.requests if size <= _SIZES["16k"] else plan.requests // 3)
        for name, size in _SIZES.items()
    }
    for name in ("hot", "cold", "shared"):
        made[f"cpu_us_16k_{name}"] = CORPORA[name](chance, _SIZES["16k"], plan.requests)
    return made


@contextmanager
def _started(plan: GatewayPlan, name: str, folder: Path, ports: tuple[int, ...]) -> Iterator[Subject]:
    settings = {"routing_policy": plan.policy}
    if plan.tokenizer is not None:
        settings["tokenizer"] = str(plan.tokenizer)
    running: AbstractContextManager[Subject] = (
        ours(folder, ports, settings)
        if name == _OURS
        else peer(folder, ports, next(each for each in plan.peers if each.name == name))
    )
    with running as subject:
        yield subject


def _measure_whole(  # noqa: PLR0913 - one place calls it
    subject: Subject,
    corpora: Mapping[str, Sequence[Ask]],
    plan: GatewayPlan,
    name: str,
    readings: _Readings,
    *,
    direct: int,
) -> None:
    short = corpora["cpu_us_200b"]
    asyncio.run(whole(subject, short[:200], clients=_CLIENTS))
    for figure, asks in corpora.items():
        served = asyncio.run(whole(subject, asks, clients=_CLIENTS))
        readings.add(name, figure, served.cpu_us)
        _note_places(readings, name, figure.removeprefix("cpu_us_"), served.placed)
    chance = random.Random(plan.seed + 1)  # noqa: S311 - texts, no secrets
    chats = conversations(chance, sessions=max(_CHATS, plan.requests // 16), turns=_TURNS, turn_bytes=1 << 10)
    served = asyncio.run(in_turns(subject, chats, clients=_CLIENTS, chance=chance))
    _note_places(readings, name, "turns", served.placed)
    through = asyncio.run(latencies(subject.url, short[1].body, requests=plan.requests // 4))
    bare = asyncio.run(latencies(f"http://127.0.0.1:{direct}", chat("hi"), requests=plan.requests // 4))
    for quantile, share in (("p50", 0.5), ("p99", 0.99)):
        added = through[int(len(through) * share)] - bare[int(len(bare) * share)]
        readings.add(name, f"added_{quantile}_us", added)
    readings.add(name, "rss_mib", subject.rss_mib())


def _note_places(readings: _Readings, name: str, corpus: str, placed: Sequence[Placed]) -> None:
    readings.add(name, f"hotspot_{corpus}", hotspot(placed, _BACKENDS))
    kept = affinity(placed)
    if kept is not None:
        readings.add(name, f"affinity_{corpus}", kept)


def _report(readings: _Readings, not_run: dict[str, str], backend: str) -> Report:
    medians = readings.medians()
    metrics = dict(medians[_OURS])
    for name, found in medians.items():
        if name != _OURS:
            metrics |= {f"peer_{name}_{metric}": value for metric, value in found.items()}
    places = [each for each in medians[_OURS] if each.startswith(("hotspot_", "affinity_"))]
    costs = [each for each in medians[_OURS] if each not in places]
    grids = tuple(
        Grid(
            name=what,
            columns=("gateway", *columns),
            rows=tuple((name, *(found.get(each) for each in columns)) for name, found in medians.items()),
        )
        for what, columns in (("gateways", costs), ("placement", places))
    )
    return Report(
        bench=NAME,
        host=Host.here(),
        metrics=metrics,
        grids=(*grids, Grid(name="setup", columns=("backend",), rows=((backend,),))),
        not_run=not_run,
    )
