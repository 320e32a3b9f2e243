"""A prefill and a decode instance on this machine, and requests that both work on, as the gateway would send them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.control import InstanceStats
from kvcontrol.core.pd import PD_HEADER, Fetch, Hold, Load, PdStats, Save, Ticket, new_ticket
from kvcontrol.core.roles import KVTransport
from tests.support import kv_events
from tests.support.instance import Instance
from tests.support.processes import eventually

ANSWER_WITHIN_S = 120.0
IDLE_WITHIN_S = 60.0
DDR_BYTES = 64 << 20
_PATHS = {True: "/v1/chat/completions", False: "/v1/completions"}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client would see: the text, why it ended, and the usage."""

    text: str
    finish_reason: str | None
    usage: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pair:
    """One that prefills and one that answers, between which prompts go by ``transport``."""

    prefill: Instance
    decode: Instance
    transport: KVTransport = KVTransport.MIGRATION

    @property
    def is_by_ticket(self) -> bool:
        return self.transport is KVTransport.MIGRATION

    @property
    def prefill_or_decode(self) -> Instance:
        """Which of them does whole requests, and has computed nothing for the other."""
        return self.decode if self.is_by_ticket else self.prefill

    @property
    def source(self) -> tuple[str, int]:
        host, _, port = pd_of(self.prefill).endpoint.rpartition(":")
        return host, int(port)

    def fetch(self, ticket: Ticket) -> Fetch:
        host, port = self.source
        return Fetch(ticket=ticket, host=host, port=port)

    def load(self) -> Load:
        host, port = self.source
        return Load(host=host, port=port)

    def complete(self, body: Mapping[str, Any], *, stream: bool = False) -> Answer:
        """Prefill at one, go on at the other."""
        if self.transport is KVTransport.TIERS:
            save(self.prefill, body)
            return complete(self.decode, body, stream=stream, header=str(self.load()))
        ticket = new_ticket()
        hold(self.prefill, body, ticket)
        return complete(self.decode, body, stream=stream, header=str(self.fetch(ticket)))

    def until_idle(self) -> None:
        """Wait until no request has a block at either, in whatever tier: all that is used is cached, and only where
        there is a cache.
        """
        for instance in (self.prefill, self.decode):
            eventually(lambda each=instance: idle(each), IDLE_WITHIN_S, "no block in use")


def hold(instance: Instance, body: Mapping[str, Any], ticket: Ticket) -> None:
    """Have a prompt prefilled and kept; fails unless it is."""
    answer = post(instance, body, stream=False, header=str(Hold(ticket=ticket)))
    assert answer.status_code == 200, answer.text


def save(instance: Instance, body: Mapping[str, Any]) -> None:
    """Have a prompt prefilled and saved to the tiers; fails unless it is."""
    answer = post(instance, body, stream=False, header=str(Save()))
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 1


def complete(instance: Instance, body: Mapping[str, Any], *, stream: bool = False, header: str | None = None) -> Answer:
    """Ask one instance; fails unless it answers."""
    answer = post(instance, body, stream=stream, header=header)
    assert answer.status_code == 200, answer.text
    return streamed(answer.text) if stream else whole(answer.json())


def post(instance: Instance, body: Mapping[str, Any], *, stream: bool, header: str | None) -> httpx2.Response:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    return httpx2.post(
        instance.url + _PATHS["messages" in body],
        json={"model": "m", "temperature": 0, **options, **body},
        headers={} if header is None else {PD_HEADER: header},
        timeout=ANSWER_WITHIN_S,
        trust_env=False,
    )


def whole(answer: Mapping[str, Any]) -> Answer:
    [choice] = answer["choices"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return Answer(text, choice["finish_reason"], answer["usage"])


def streamed(text: str) -> Answer:
    pieces, reason, usage = [], None, {}
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", lines[-1:]
    for line in lines[:-1]:
        event = json.loads(line)
        assert "error" not in event, event
        for choice in event["choices"]:
            pieces.append((choice["delta"].get("content") or "") if "delta" in choice else choice["text"])
            reason = choice.get("finish_reason") or reason
        usage = event.get("usage") or usage
    return Answer("".join(pieces), reason, usage)


def stats(instance: Instance) -> InstanceStats:
    return kv_events.stats(instance.url)


def pd_of(instance: Instance) -> PdStats:
    pd = stats(instance).pd
    assert pd is not None
    return pd


def used_blocks(instance: Instance) -> int:
    return stats(instance).tiers[CacheTier.HBM].used_blocks


def idle(instance: Instance) -> bool:
    return all(tier.used_blocks == tier.cached_blocks for tier in stats(instance).tiers.values())


@contextmanager
def tiered_pair_of(
    model: Path,
    logs: Path,
    *options: str,
    settings: Mapping[str, str] | None = None,
    decode_options: Sequence[str] = (),
) -> Iterator[Pair]:
    """Start two hybrid instances with tiers, between which prompts go through these."""
    told = {"KVGATE_ENGINE_PD_TRANSPORT": "tiers", "KVGATE_ENGINE_DDR_BYTES": str(DDR_BYTES), **(settings or {})}
    with ExitStack() as stack:
        started = []
        for name in ("prefill", "decode"):
            more = ("--num-gpu-blocks", "1024", *options, *(decode_options if name == "decode" else ()))
            started.append(Instance.start(model, logs / f"{name}.log", *more, settings=told))
            stack.push(started[-1].__exit__)
        for each in started:
            each.wait_healthy()
        yield Pair(*started, KVTransport.TIERS)


@contextmanager
def pair_of(
    model: Path,
    logs: Path,
    *options: str,
    settings: Mapping[str, str] | None = None,
    decode_options: Sequence[str] = (),
) -> Iterator[Pair]:
    """Start both, at once."""
    with ExitStack() as stack:
        started = []
        for role in ("Prefill", "Decode"):
            log = logs / f"{role.lower()}.log"
            own = decode_options if role == "Decode" else ()
            more = ("--role", role, "--num-gpu-blocks", "1024", *options, *own)
            started.append(Instance.start(model, log, *more, settings=settings))
            stack.push(started[-1].__exit__)
        for each in started:
            each.wait_healthy()
        yield Pair(*started)


def at_once(work: Any, items: Any, *, workers: int = 8) -> list[Any]:
    """Do ``work`` on all items, so many at a time, and return the results in order."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, items))
