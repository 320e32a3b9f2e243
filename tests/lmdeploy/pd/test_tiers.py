"""One instance prefills into its tiers, the other loads from there: real processes, and a wire that can be broken."""

import asyncio
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcontrol.core.pd import Fetch, Hold, Load, new_ticket
from kvcontrol.core.roles import KVTransport
from tests.support.broken_wire import Break, Fault, broken_wire
from tests.support.pd_gateway import LIMIT_S, ask, gateway_of, kill_all_of, leave_at_any_moment, stop_or_go
from tests.support.pd_gateway import body_of as gateway_body
from tests.support.pd_pair import Answer, Pair, at_once, complete, idle, pd_of, post, save, stats, tiered_pair_of
from tests.support.processes import eventually
from tests.support.running_gateway import RunningGateway

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LENGTHS = (5, 15, 16, 17, 64, 65, 130, 513, 1100)


@pytest.fixture(scope="module")
def pair(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    options = ("--session-len", "4096", "--max-prefill-token-num", "512")
    settings = {"KVGATE_ENGINE_PD_TRANSFER_TIMEOUT_S": "60"}
    with tiered_pair_of(tiny_llama, tmp_path_factory.mktemp("pd"), *options, settings=settings) as pair:
        yield pair


def body_of(letters: int, seed: int = 0, **more: Any) -> dict[str, Any]:
    dice = random.Random(letters * 1000 + seed)  # noqa: S311
    prompt = "".join(dice.choice("bcdfghjklmnpqrstvwxz") for _ in range(letters))
    return {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, **more}


@pytest.mark.parametrize("stream", [False, True])
def test_completions_are_those_of_one_instance_at_every_length(pair: Pair, *, stream: bool) -> None:
    before = pd_of(pair.decode)
    bodies = [body_of(letters, seed=stream) for letters in LENGTHS]
    found = at_once(lambda body: pair.complete(body, stream=stream), bodies)
    after = pd_of(pair.decode)
    expected = at_once(lambda body: complete(pair.prefill, body), bodies)
    assert [answer.text for answer in found] == [answer.text for answer in expected]
    for answer, alone in zip(found, expected, strict=True):
        assert answer.usage["prompt_tokens"] == alone.usage["prompt_tokens"]
        assert answer.usage["completion_tokens"] == 12
        assert not (answer.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    assert after.recomputed == before.recomputed
    assert after.fetched == before.fetched + sum(answer.usage["prompt_tokens"] > 16 for answer in expected)
    pair.until_idle()


def test_what_both_have_moves_once(pair: Pair) -> None:
    body = body_of(400, seed=7)
    alone = complete(pair.prefill, body)
    first, moved = pair.complete(body), pd_of(pair.decode)
    again = pair.complete(body)
    assert first.text == again.text == alone.text
    assert pd_of(pair.decode).fetched_bytes == moved.fetched_bytes > 0
    longer = {**body, "prompt": body["prompt"] + body_of(200, seed=8)["prompt"]}
    assert pair.complete(longer).text == complete(pair.prefill, longer).text
    more = pd_of(pair.decode).fetched_bytes - moved.fetched_bytes
    assert 0 < more < moved.fetched_bytes
    pair.until_idle()


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        (Break(fault=Fault.FLIP, at=100_000), "checksum"),
        (Break(fault=Fault.CUT, at=100_000), "lost"),
        (Break(fault=Fault.CUT, at=0), "lost"),
        (Break(fault=Fault.FLIP, at=0), "protocol"),
    ],
)
def test_a_broken_wire_costs_a_prefill_and_not_the_answer(pair: Pair, how: Break, cause: str) -> None:
    body = body_of(600, seed=how.at + len(how.fault))
    before = pd_of(pair.decode)
    save(pair.prefill, body)
    with broken_wire(*pair.source, how) as port:
        found = complete(pair.decode, body, header=str(Load(host="127.0.0.1", port=port)))
    assert found.text == complete(pair.prefill, body).text
    after = pd_of(pair.decode)
    assert after.recomputed.get(cause, 0) == before.recomputed.get(cause, 0) + 1
    assert after.fetched == before.fetched
    pair.until_idle()


def test_a_prompt_that_nobody_saved_and_a_host_that_is_no_peer_cost_no_answer(pair: Pair) -> None:
    for source, cause in ((pair.load(), "refused"), (Load(host="192.0.2.1", port=9), "unlisted")):
        body, before = body_of(200, seed=len(cause)), pd_of(pair.decode).recomputed.get(cause, 0)
        found = complete(pair.decode, body, header=str(source))
        assert found.text == complete(pair.prefill, body).text
        assert pd_of(pair.decode).recomputed[cause] == before + 1


def test_tickets_are_refused_here(pair: Pair) -> None:
    ticket = new_ticket()
    for part in (Hold(ticket=ticket), Fetch(ticket=ticket, host="127.0.0.1", port=9)):
        answer = post(pair.decode, body_of(20), stream=False, header=str(part))
        assert answer.status_code == 400, answer.text
        assert "hybrid instance" in answer.text
    assert stats(pair.decode).transports == stats(pair.prefill).transports
    assert list(stats(pair.decode).transports) == [KVTransport.TIERS]


async def test_the_gateway_separates_through_the_tiers_and_leaves_it_where_the_prompt_is_held(
    pair: Pair, tiny_llama: Path, tmp_path: Path
) -> None:
    before = pd_of(pair.decode)
    async with gateway_of(pair, tiny_llama, tmp_path, route_memory_s=0.0) as gateway:
        for stream in (False, True):
            body = gateway_body(900, 20 + stream, **({"stream": True} if stream else {}))
            found, route = await ask(gateway, body)
            assert "pd=separated;prefill=p0" in route
            assert found.text == complete(pair.prefill, {**body, "stream": False}).text
        short, route = await ask(gateway, gateway_body(10, 1))
        assert "pd=short" in route
        assert pd_of(pair.decode).fetched == before.fetched + 2
        again, route = await _until_held(gateway, gateway_body(900, 21))
        assert "pd=held" in route or "pd=short" in route
        assert again.text == found.text
    assert short.text == complete(pair.prefill, gateway_body(10, 1)).text
    assert pd_of(pair.decode).recomputed == before.recomputed
    pair.until_idle()


async def _until_held(gateway: RunningGateway, body: dict[str, Any]) -> tuple[Answer, str]:
    """Ask until the events have told the gateway what the answering instance holds."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            found, route = await ask(gateway, body)
            if "pd=separated" not in route:
                return found, route


@pytest.mark.parametrize("count", [50, pytest.param(500, marks=pytest.mark.slow)])
async def test_clients_that_leave_at_any_moment_leave_no_block_behind(
    pair: Pair, tiny_llama: Path, tmp_path: Path, count: int
) -> None:
    async with gateway_of(pair, tiny_llama, tmp_path) as gateway:
        await leave_at_any_moment(pair, gateway, count)


@pytest.mark.slow
async def test_either_instance_dies_and_no_answer_is_lost(tiny_llama: Path, tmp_path: Path) -> None:
    options = ("--session-len", "4096", "--max-prefill-token-num", "512")
    settings = {"KVGATE_ENGINE_PD_TRANSFER_TIMEOUT_S": "5"}
    with tiered_pair_of(tiny_llama, tmp_path, *options, settings=settings) as pair:
        async with gateway_of(
            pair, tiny_llama, tmp_path / "state", first_byte_timeout_s=20.0, health_timeout_s=2.0
        ) as gateway:
            stalled = gateway_body(500, 5)
            await asyncio.to_thread(save, pair.prefill, stalled)
            expected = (await asyncio.to_thread(complete, pair.prefill, stalled)).text
            load = str(pair.load())
            stop_or_go(pair.prefill, signal.SIGSTOP)
            try:  # it hangs when its blocks are asked for, and when it is asked to prefill
                assert (await asyncio.to_thread(complete, pair.decode, stalled, header=load)).text == expected
                found, _ = await ask(gateway, gateway_body(500, 6))
            finally:
                stop_or_go(pair.prefill, signal.SIGCONT)
            assert found.text == (await asyncio.to_thread(complete, pair.prefill, gateway_body(500, 6))).text
            await gateway.usable(2)
            body = gateway_body(600, 7)
            await asyncio.to_thread(save, pair.prefill, body)
            expected = (await asyncio.to_thread(complete, pair.prefill, body)).text
            await asyncio.to_thread(kill_all_of, pair.prefill)  # between the two calls, and before the first
            assert (await asyncio.to_thread(complete, pair.decode, body, header=load)).text == expected
            found, _ = await ask(gateway, gateway_body(600, 8))
            assert found.text == (await asyncio.to_thread(complete, pair.decode, gateway_body(600, 8))).text
            assert pd_of(pair.decode).fetched == 0
            assert sum(pd_of(pair.decode).recomputed.values()) >= 2
        eventually(lambda: idle(pair.decode), 60, "no block in use")
