"""The gateway walks separated plans over two real instances, and every way that one of them can fail a request."""

import asyncio
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import aiohttp
import pytest

from dashboards.panel import Proof
from kvcontrol.core.pd import new_ticket
from tests.support.panels import queries_of, until_all_find
from tests.support.pd_gateway import LIMIT_S, ask, body_of, gateway_of, kill_all_of, leave_at_any_moment, stop_or_go
from tests.support.pd_pair import Pair, complete, hold, pair_of, pd_of, used_blocks
from tests.support.processes import eventually
from tests.support.prometheus import Target, running_prometheus

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

LEASE_S = "8"


@pytest.fixture(scope="module")
def pair(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Short leases: what nobody fetches goes soon."""
    options = ("--session-len", "4096", "--max-prefill-token-num", "512")
    settings = {"KVGATE_ENGINE_PD_LEASE_S": LEASE_S, "KVGATE_ENGINE_PD_TRANSFER_TIMEOUT_S": "30"}
    with pair_of(tiny_llama, tmp_path_factory.mktemp("pd"), *options, settings=settings) as pair:
        yield pair


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


async def test_panels_of_prompts_that_change_hands_find_them_in_a_real_prometheus(
    pair: Pair, tiny_llama: Path, tmp_path: Path
) -> None:
    body = body_of(300, 4)
    assert complete(pair.decode, body, header=str(pair.fetch(new_ticket()))).text, "a ticket that nobody holds"
    async with gateway_of(pair, tiny_llama, tmp_path) as gateway:
        targets = [
            Target("kvgate-gateway", gateway.url.removeprefix("http://"), {"gateway": "g"}),
            Target("kvgate-engine", pair.decode.url.removeprefix("http://"), {"instance": "d0"}),
            Target("kvgate-engine", pair.prefill.url.removeprefix("http://"), {"instance": "p0"}),
        ]
        over = asyncio.Event()

        async def work() -> None:
            for seed in count(100):
                if over.is_set():
                    return
                await ask(gateway, body_of(300, seed))

        def look() -> None:
            with running_prometheus(tmp_path, targets) as prometheus:
                until_all_find(prometheus, queries_of(Proof.SEPARATED), instance="d0")

        working = asyncio.create_task(work())
        try:
            await asyncio.to_thread(look)
        finally:
            over.set()
            await working
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
    async with gateway_of(pair, tiny_llama, tmp_path) as gateway:
        await leave_at_any_moment(pair, gateway, count)


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
