"""What can fail between two instances, step by step, by both ways: an answer is right or ends, and no block stays."""

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import pytest

from kvcontrol.core.pd import Fetch, Load, new_ticket
from kvcontrol.core.roles import KVTransport
from tests.support.broken_wire import Break, Fault, broken_wire
from tests.support.databases import Server, postgres, redis_server
from tests.support.pd_gateway import LIMIT_S, ask, body_of, gateway_of, kill_all_of, stop_or_go
from tests.support.pd_pair import (
    PD_HEADER,
    Pair,
    at_once,
    complete,
    hold,
    idle,
    pair_of,
    pd_of,
    save,
    tiered_pair_of,
    whole,
)
from tests.support.processes import eventually
from tests.support.replicas import gateway_server
from tests.support.running_gateway import eventually as until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

LEASE_S = "8"
OPTIONS = ("--session-len", "4096", "--max-prefill-token-num", "512")
STALLED = Break(fault=Fault.STALL, at=20_000)
"""In the midst of the blocks' bytes."""


@pytest.fixture(params=KVTransport)
def transport(request: pytest.FixtureRequest) -> KVTransport:
    return KVTransport(request.param)


@pytest.fixture
def pair(transport: KVTransport, tiny_llama: Path, tmp_path: Path) -> Iterator[Pair]:
    settings = {"KVGATE_ENGINE_PD_LEASE_S": LEASE_S, "KVGATE_ENGINE_PD_TRANSFER_TIMEOUT_S": "30"}
    begin = pair_of if transport is KVTransport.MIGRATION else tiered_pair_of
    with begin(tiny_llama, tmp_path, *OPTIONS, settings=settings) as pair:
        yield pair


def computed(pair: Pair, body: dict[str, Any], *, port: int | None = None) -> str:
    """Have a prompt prefilled, and return the header to get it with, over ``port`` instead of directly."""
    host, own = pair.source
    body = {**body, "stream": False}
    if pair.is_by_ticket:
        ticket = new_ticket()
        hold(pair.prefill, body, ticket)
        return str(Fetch(ticket=ticket, host=host, port=port or own))
    save(pair.prefill, body)
    return str(Load(host=host, port=port or own))


def test_clients_leave_and_the_decode_instance_dies_in_the_midst_of_a_transfer(pair: Pair) -> None:
    with broken_wire(*pair.source, STALLED) as port:
        body = body_of(900, 1, stream=True)
        header = computed(pair, body, port=port)
        with pytest.raises(httpx2.TimeoutException):
            httpx2.post(
                f"{pair.decode.url}/v1/completions",
                json=body,
                headers={PD_HEADER: header},
                timeout=3.0,
                trust_env=False,
            )
        pair.until_idle()
    body = body_of(400, 2)
    assert complete(pair.decode, body, header=computed(pair, body)).text == complete(pair.prefill_or_decode, body).text
    with broken_wire(*pair.source, STALLED) as port:
        body = body_of(900, 3, stream=True)
        header = computed(pair, body, port=port)
        with suppress(httpx2.TimeoutException):
            httpx2.post(
                f"{pair.decode.url}/v1/completions",
                json=body,
                headers={PD_HEADER: header},
                timeout=2.0,
                trust_env=False,
            )
        kill_all_of(pair.decode)
        eventually(lambda: idle(pair.prefill), 60, "no block in use")
        assert pd_of(pair.prefill).held_requests == 0


async def test_a_client_leaves_while_its_prompt_is_computed_and_the_decode_instance_is_gone(
    pair: Pair, tiny_llama: Path, tmp_path: Path
) -> None:
    async with gateway_of(pair, tiny_llama, tmp_path / "state", health_timeout_s=20.0) as gateway:
        stop_or_go(pair.prefill, signal.SIGSTOP)
        try:
            with pytest.raises(TimeoutError):
                await _ask(f"{gateway.url}/v1/completions", body_of(900, 4), within_s=3.0)
        finally:
            stop_or_go(pair.prefill, signal.SIGCONT)
        await asyncio.to_thread(pair.until_idle)
        kill_all_of(pair.decode)
        if pair.is_by_ticket:  # LMDeploy's role can't answer
            assert await _ask(f"{gateway.url}/v1/completions", body_of(900, 5), within_s=LIMIT_S) in {502, 503}
        else:
            for body in (body_of(900, 5), body_of(900, 6)):  # before it is known that the other is gone, and after
                found, route = await ask(gateway, body)
                assert "prefill=" not in route
                assert found.text == (await asyncio.to_thread(complete, pair.prefill, body)).text
        await asyncio.to_thread(eventually, lambda: idle(pair.prefill), 60, "no block in use")


async def _ask(url: str, body: dict[str, Any], *, within_s: float) -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=body, timeout=aiohttp.ClientTimeout(within_s)) as answer,
    ):
        await answer.read()
        return answer.status


def test_an_instance_that_is_full_answers_all_the_same(
    transport: KVTransport, tiny_llama: Path, tmp_path: Path
) -> None:
    """One prompt nearly fills what answers: the others wait for its blocks, or for its lease to end."""
    settings = {"KVGATE_ENGINE_PD_LEASE_S": LEASE_S, "KVGATE_ENGINE_PD_TRANSFER_TIMEOUT_S": "30"}
    begin = pair_of if transport is KVTransport.MIGRATION else tiered_pair_of
    small = ("--num-gpu-blocks", "64")
    if transport is KVTransport.TIERS:
        settings["KVGATE_ENGINE_DDR_BYTES"] = str(64 * 8192)
    with begin(tiny_llama, tmp_path, *OPTIONS, settings=settings, decode_options=small) as pair:
        bodies = [body_of(700, seed, max_tokens=40) for seed in range(8)]
        found = at_once(lambda body: complete(pair.decode, body, header=computed(pair, body)), bodies)
        alone = at_once(lambda body: complete(pair.decode, body), bodies)
        assert [each.text for each in found] == [each.text for each in alone]
        pair.until_idle()
        pd = pd_of(pair.decode)
        assert pd.fetched + sum(pd.recomputed.values()) == len(bodies)


async def test_a_gateway_is_killed_while_prompts_change_hands_and_another_one_goes_on(
    pair: Pair, tiny_llama: Path, tmp_path: Path
) -> None:
    async with two_gateways(pair, tiny_llama, tmp_path) as (doomed, other):
        dice = random.Random(1)  # noqa: S311
        for turn in range(3):
            bodies = [body_of(700, 100 * turn + number) for number in range(4)]
            lost = [asyncio.create_task(_lost(doomed.port, body_of(700, 100 * turn + 50 + n))) for n in range(4)]
            kept = [asyncio.create_task(_text(other.port, body)) for body in bodies]
            await asyncio.sleep(dice.uniform(0, 1.5))  # at whatever point of their way the requests are then
            await asyncio.to_thread(doomed.kill)
            await asyncio.gather(*lost)
            found = await asyncio.gather(*kept)
            await asyncio.to_thread(pair.until_idle)
            assert pd_of(pair.prefill).held_requests == 0
            alone = await asyncio.to_thread(at_once, lambda body: complete(pair.prefill_or_decode, body).text, bodies)
            assert found == alone
            await asyncio.to_thread(doomed.again)
            await _ready(doomed.port)


@asynccontextmanager
async def two_gateways(pair: Pair, model: Path, folder: Path) -> AsyncIterator[list[Server]]:
    """Run two gateway processes on one PostgreSQL and one Redis, before the pair."""
    named = [{"id": "p0", "url": pair.prefill.url}, {"id": "d0", "url": pair.decode.url}]
    if pair.transport is KVTransport.TIERS:  # else the instances report it
        named = [each | {"role": role} for each, role in zip(named, ("prefill", "decode"), strict=True)]
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server())
        settings = {
            "KVGATE_STORE_URL": stack.enter_context(postgres()),
            "KVGATE_REDIS_URL": f"redis://127.0.0.1:{redis.port}/0",
            "KVGATE_SALT_SECRET": "the same secret everywhere",
            "KVGATE_INSTANCES": json.dumps(named),
            "KVGATE_TOKENIZER": str(model),
            "KVGATE_PD_MIN_UNCACHED_TOKENS": "64",
        }
        gateways = []
        for name in ("doomed", "other"):
            gateway = gateway_server(folder, name, settings | {"KVGATE_STATE_DIR": str(folder / name)})
            stack.callback(gateway.end)
            gateways.append(gateway)
        for gateway in gateways:
            await _ready(gateway.port)
        yield gateways


async def _ready(port: int) -> None:
    async with aiohttp.ClientSession() as session:

        async def usable() -> bool:
            try:
                async with session.get(f"http://127.0.0.1:{port}/readyz") as answer:
                    return bool((await answer.json())["usable"] == 2)
            except aiohttp.ClientError:
                return False

        await until(usable, LIMIT_S)


async def _text(port: int, body: dict[str, Any]) -> str:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(LIMIT_S)) as session,
        session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as answer,
    ):
        text = await answer.text()
        assert answer.status == 200, text
        return whole(json.loads(text)).text


async def _lost(port: int, body: dict[str, Any]) -> None:
    """Ask a gateway that is going to be killed; its answer may have come before."""
    with suppress(aiohttp.ClientError):
        await _text(port, body)
