"""The gateway walks separated plans over two real instances, and every way that one of them can fail a request."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import psutil
import pytest

from kvcontrol.core.pd import new_ticket
from tests.support.instance import Instance
from tests.support.pd_pair import Answer, Pair, at_once, complete, hold, pair_of, pd_of, streamed, used_blocks, whole
from tests.support.processes import eventually
from tests.support.running_gateway import RunningGateway, running_gateway

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

LIMIT_S = 120.0
LEASE_S = "8"


@pytest.fixture(scope="module")
def pair(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Short leases: what nobody fetches goes soon."""
    options = ("--session-len", "4096", "--max-prefill-token-num", "512")
    settings = {"KVGATE_ENGINE_PD_LEASE_S": LEASE_S, "KVGATE_ENGINE_PD_TRANSFER_TIMEOUT_S": "30"}
    with pair_of(tiny_llama, tmp_path_factory.mktemp("pd"), *options, settings=settings) as pair:
        yield pair


@asynccontextmanager
async def gateway_of(pair: Pair, model: Path, state: Path, **settings: Any) -> AsyncIterator[RunningGateway]:
    named = [{"id": "p0", "url": pair.prefill.url}, {"id": "d0", "url": pair.decode.url}]
    more = {"tokenizer": model, "pd_min_uncached_tokens": 64, "health_interval_s": 1.0} | settings
    async with running_gateway(state, instances=named, **more) as gateway:
        await gateway.usable(2)
        yield gateway


def body_of(letters: int, seed: int, **more: Any) -> dict[str, Any]:
    dice = random.Random(letters * 1000 + seed)  # noqa: S311
    prompt = "".join(dice.choice("bcdfghjklmnpqrstvwxz") for _ in range(letters))
    return {"model": "m", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **more}


async def ask(gateway: RunningGateway, body: dict[str, Any]) -> tuple[Answer, str]:
    """Return the answer and the route that it took; fails unless it is 200."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with gateway.session.post(gateway.url + path, json=body, timeout=aiohttp.ClientTimeout(LIMIT_S)) as answer:
        text = await answer.text()
        assert answer.status == 200, text
        found = streamed(text) if body.get("stream") else whole(await answer.json())
        return found, answer.headers["x-kvgate-route"]


@pytest.mark.parametrize("stream", [False, True])
async def test_long_prompts_are_prefilled_elsewhere_and_answered_alike(
    pair: Pair, tiny_llama: Path, tmp_path: Path, *, stream: bool
) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    before = pd_of(pair.decode).fetched
    async with gateway_of(pair, tiny_llama, tmp_path) as gateway:
        chat = {key: value for key, value in body_of(0, 0).items() if key != "prompt"}
        chat["messages"] = [{"role": "user", "content": body_of(900, 1)["prompt"]}]
        for body in (body_of(900, 2), chat):
            found, route = await ask(gateway, body | options)
            alone = complete(pair.decode, body)
            assert "pd=separated;prefill=p0" in route
            assert (found.text, found.finish_reason) == (alone.text, alone.finish_reason)
            assert found.usage["prompt_tokens"] == alone.usage["prompt_tokens"]
            assert found.usage["completion_tokens"] == 12
        short, route = await ask(gateway, body_of(10, 0) | options)
        assert "pd=short" in route
        assert short.text == complete(pair.decode, body_of(10, 0)).text
        _, route = await ask(gateway, body_of(900, 2) | options)  # there is no prefix cache that could hold it
        assert "pd=separated" in route
    assert pd_of(pair.decode).fetched == before + 3
    pair.until_idle()


async def test_what_a_prefill_instance_refuses_is_answered_all_the_same(
    pair: Pair, tiny_llama: Path, tmp_path: Path
) -> None:
    body = body_of(300, 3)
    chat = {key: value for key, value in body.items() if key != "prompt"}
    chat |= {"messages": [{"role": "user", "content": body["prompt"]}], "logit_bias": {"300": 5}}
    before = pd_of(pair.decode)
    async with gateway_of(pair, tiny_llama, tmp_path) as gateway:
        found, route = await ask(gateway, chat)
    assert "pd=separated" in route
    assert found.text == complete(pair.decode, chat).text
    assert pd_of(pair.decode) == before
    pair.until_idle()


@pytest.mark.parametrize("count", [50, pytest.param(500, marks=pytest.mark.slow)])
async def test_clients_that_leave_at_any_moment_leave_no_block_behind(
    pair: Pair, tiny_llama: Path, tmp_path: Path, count: int
) -> None:
    dice = random.Random(count)  # noqa: S311
    bodies = [body_of(dice.choice([70, 300, 900]), seed, max_tokens=40, stream=True) for seed in range(count)]
    async with gateway_of(pair, tiny_llama, tmp_path) as gateway:

        def leave(job: tuple[dict[str, Any], float]) -> bool:
            body, after_s = job
            try:
                with httpx2.stream(
                    "POST", f"{gateway.url}/v1/completions", json=body, timeout=after_s, trust_env=False
                ) as answer:
                    for _ in answer.iter_bytes():
                        pass
            except httpx2.TimeoutException:
                return True
            return False

        jobs = [(body, dice.uniform(0.01, 1.0)) for body in bodies]
        left = await asyncio.to_thread(at_once, leave, jobs)
        assert sum(left) > count // 10
        await asyncio.to_thread(pair.until_idle)
        assert pd_of(pair.prefill).held_requests == 0
        body = body_of(400, 99)
        found, _ = await ask(gateway, body)
        assert found.text == complete(pair.decode, body).text
    pair.until_idle()


def stop_or_go(instance: Instance, number: signal.Signals) -> None:
    for process in [*instance.children(), instance.process]:
        os.kill(process.pid, number)


def kill_all_of(instance: Instance) -> None:
    """Kill an instance, and return once it is gone."""
    children = instance.children()
    for process in [instance.process, *children]:
        os.kill(process.pid, signal.SIGKILL)
    instance.process.wait(60)
    psutil.wait_procs(children, timeout=60)


async def test_a_prefill_instance_that_hangs_and_one_that_dies_cost_time_and_no_answer(
    tiny_llama: Path, tmp_path: Path
) -> None:
    options = ("--session-len", "4096", "--max-prefill-token-num", "512")
    settings = {"KVGATE_ENGINE_PD_LEASE_S": LEASE_S, "KVGATE_ENGINE_PD_TRANSFER_TIMEOUT_S": "5"}
    with pair_of(tiny_llama, tmp_path, *options, settings=settings) as pair:
        ticketless = body_of(500, 5)
        async with gateway_of(
            pair, tiny_llama, tmp_path / "state", first_byte_timeout_s=20.0, health_timeout_s=2.0
        ) as gateway:
            stop_or_go(pair.prefill, signal.SIGSTOP)
            try:
                found, _ = await ask(gateway, ticketless)
            finally:
                stop_or_go(pair.prefill, signal.SIGCONT)
            assert found.text == complete(pair.decode, ticketless).text
            await gateway.usable(2)
            held = body_of(300, 6)
            ticket = new_ticket()
            hold(pair.prefill, held, ticket)
            fetch = str(pair.fetch(ticket))
            kill_all_of(pair.prefill)
            # Between the two calls of one request:
            assert complete(pair.decode, held, header=fetch).text == complete(pair.decode, held).text
            assert sum(pd_of(pair.decode).recomputed.values()) == 1
            assert pd_of(pair.decode).fetched == 0
            # And before the first:
            found, _ = await ask(gateway, body_of(600, 7))
            assert found.text == complete(pair.decode, body_of(600, 7)).text
        eventually(lambda: used_blocks(pair.decode) == 0, 60, "no block in use")


@pytest.mark.slow
async def test_a_decode_instance_that_dies_ends_its_answers_and_leaves_nothing_at_the_other(
    tiny_llama: Path, tmp_path: Path
) -> None:
    options = ("--session-len", "4096", "--max-prefill-token-num", "512")
    with pair_of(tiny_llama, tmp_path, *options, settings={"KVGATE_ENGINE_PD_LEASE_S": LEASE_S}) as pair:
        async with gateway_of(pair, tiny_llama, tmp_path / "state") as gateway:
            body = body_of(500, 8, max_tokens=3000, stream=True)
            async with gateway.session.post(
                f"{gateway.url}/v1/completions", json=body, timeout=aiohttp.ClientTimeout(LIMIT_S)
            ) as answer:
                assert answer.status == 200
                await answer.content.readany()
                kill_all_of(pair.decode)
                rest = await answer.content.read()
            assert b'"error"' in rest
            async with gateway.session.post(
                f"{gateway.url}/v1/completions", json=body_of(500, 9), timeout=aiohttp.ClientTimeout(LIMIT_S)
            ) as answer:
                assert answer.status in {502, 503}, await answer.text()
        eventually(lambda: used_blocks(pair.prefill) == 0, 60, "no block in use")
