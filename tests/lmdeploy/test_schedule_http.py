"""Priority holds from the request's header to its first token, however many requests are ahead and beyond the batch."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvcontrol.core.control import DEADLINE_HEADER, PRIORITY_HEADER, STATS_PATH
from kvcontrol.core.policy_control import POLICY_PATH
from tests.support.admin import ADMIN_KEY, Admin
from tests.support.instance import Instance
from tests.support.running_gateway import RunningGateway, running_gateway

pytestmark = pytest.mark.engine

BATCH = 2
WITHIN_S = 200.0
BOUND = 70


@pytest.fixture(scope="module")
def instance(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    log = tmp_path_factory.mktemp("schedule") / "log"
    options = ("--max-batch-size", str(BATCH), "--num-gpu-blocks", "600", "--logprobs-mode", "raw_logprobs")
    settings = {"KVGATE_ENGINE_MAX_REQUESTS": str(BOUND), "KVGATE_ENGINE_CONTROL_TIMEOUT_S": "30"}
    with Instance.start(tiny_llama, log, *options, settings=settings) as instance:
        yield instance


class Client:
    """Streams from the instance and notes in which order first tokens came."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session
        self.first: list[str] = []
        self.begun: set[str] = set()

    async def tokens(self, text: str, **headers: str) -> list[str]:
        """Return the tokens of an answer that isn't streamed."""
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 6,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": True,
        }
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return [each["token"] for each in (await answer.json())["choices"][0]["logprobs"]["content"]]

    async def stream(self, name: str, *, tokens: int, **headers: str) -> str:
        """Return the answer's text once it is complete."""
        body = {
            "model": "m",
            "prompt": f"{name} tells a story",
            "max_tokens": tokens,
            "stream": True,
            "ignore_eos": True,
            "temperature": 0,
        }
        said = ""
        async with self.session.post(f"{self.url}/v1/completions", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                piece = json.loads(line[6:])["choices"][0]["text"]
                if name not in self.begun:
                    self.begun.add(name)
                    self.first += [] if name.startswith("holder") else [name]
                said += piece
        return said

    async def shown(self) -> dict[str, Any]:
        async with self.session.get(f"{self.url}{POLICY_PATH}") as answer:
            assert answer.status == 200, await answer.text()
            policies = (await answer.json())["policies"]
        found: dict[str, Any] = next(each for each in policies if each["kind"] == "schedule")
        return found

    async def swap(self, name: str, **params: float) -> dict[str, Any]:
        body = {"kind": "schedule", "name": name, "params": params}
        async with self.session.put(f"{self.url}{POLICY_PATH}", json=body) as answer:
            assert answer.status == 200, await answer.text()
            policies = (await answer.json())["policies"]
        found: dict[str, Any] = next(each for each in policies if each["kind"] == "schedule")
        return found

    async def waiting(self, **expected: int) -> None:
        """Wait until so many of each class wait in the engine."""
        while True:
            classes = (await self.shown())["schedule"]["classes"]
            if {name: classes[name]["waiting"] for name in expected} == expected:
                return
            await asyncio.sleep(0.05)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Keep the batch full while the block runs."""
        self.begun -= {f"holder{n}" for n in range(BATCH)}
        self.first.clear()
        holders = [asyncio.create_task(self.stream(f"holder{n}", tokens=3000)) for n in range(BATCH)]
        try:
            while len([name for name in self.begun if name.startswith("holder")]) < BATCH:
                await asyncio.sleep(0.01)
            yield
            assert not any(each.done() for each in holders), "the batch was not held"
        finally:
            for each in holders:
                each.cancel()
            await asyncio.gather(*holders, return_exceptions=True)

    async def idle(self) -> None:
        """Wait until nothing of any request is left, in the queue, the batch and the pool."""
        while True:
            async with self.session.get(f"{self.url}{STATS_PATH}") as answer:
                stats = await answer.json()
            hbm, load = stats["tiers"]["HBM"], stats["load"]
            if load["running"] == load["waiting"] == 0 and hbm["used_blocks"] <= hbm["cached_blocks"]:
                return
            await asyncio.sleep(0.05)


@pytest.fixture
async def client(instance: Instance) -> AsyncIterator[Client]:
    timeout = aiohttp.ClientTimeout(total=WITHIN_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        yield Client(instance.url, session)


async def test_an_important_request_behind_64_beyond_the_batch_is_served_next(client: Client) -> None:
    async with asyncio.timeout(WITHIN_S):
        async with client.held():
            ordinary = [asyncio.create_task(client.stream(f"r{n}", tokens=500)) for n in range(64)]
            await client.waiting(normal=64)
            important = asyncio.create_task(client.stream("important", tokens=2, **{PRIORITY_HEADER: "high"}))
            await client.waiting(normal=64, high=1)
            assert client.first == []
        assert await important
        # One began beside it when both places became free, and one has followed it; each takes hundreds of steps.
        assert len(set(client.first) - {"important"}) <= BATCH
        for each in ordinary:
            each.cancel()
        await asyncio.gather(*ordinary, return_exceptions=True)
        await client.idle()
        report = (await client.shown())["schedule"]
        assert (report["errors"], report["repairs"], report["waiting"]) == (0, 0, 0)
        assert report["classes"]["high"]["started"] == 1


async def test_a_tenants_priority_holds_from_the_gateway_to_the_first_token(
    client: Client, instance: Instance, tmp_path: Path
) -> None:
    keys = [{"key": "k-ordinary", "tenant": "ordinary"}, {"key": "k-important", "tenant": "important"}]
    named = [{"id": "i0", "url": instance.url}]
    async with asyncio.timeout(WITHIN_S):
        await client.idle()
        async with running_gateway(
            tmp_path, instances=named, api_keys=keys, admin_key=ADMIN_KEY, health_interval_s=1.0, health_timeout_s=20.0
        ) as gateway:
            await gateway.usable(1)
            await Admin(gateway).ok("PUT", "/quotas/important", {"priority": "high"})
            through = Client(gateway.url, client.session)
            async with client.held():
                ordinary = [
                    asyncio.create_task(through.stream(f"r{n}", tokens=500, authorization="Bearer k-ordinary"))
                    for n in range(64)
                ]
                await _queued(gateway, client, 64)
                important = asyncio.create_task(
                    through.stream("important", tokens=2, authorization="Bearer k-important")
                )
                await client.waiting(high=1)
                await _queued(gateway, client, 65)
                assert through.first == []
            assert await important
            # It had reached the engine, which had no place yet: as in the test above.
            assert len(set(through.first) - {"important"}) <= BATCH
            for each in ordinary:
                each.cancel()
            await asyncio.gather(*ordinary, return_exceptions=True)
            await client.idle()


async def _queued(gateway: RunningGateway, client: Client, count: int) -> None:
    """Wait until so many requests wait, at the gateway and in the engine."""
    while True:
        classes = (await client.shown())["schedule"]["classes"].values()
        if await gateway.metric("kvgate_requests_waiting") + sum(each["waiting"] for each in classes) == count:
            return
        await asyncio.sleep(0.05)


async def test_deadlines_reach_the_engine_and_order_what_waits(client: Client) -> None:
    async with asyncio.timeout(WITHIN_S):
        assert (await client.swap("slo_aware", patience_s=1000))["name"] == "slo_aware"
        async with client.held():
            tasks = [
                asyncio.create_task(client.stream(f"d{n}", tokens=120, **{DEADLINE_HEADER: str(900_000 - 1000 * n)}))
                for n in range(4)
            ]
            await client.waiting(normal=4)
        await asyncio.gather(*tasks)
        assert {*client.first[:BATCH]} == {"d3", "d2"}
        await client.swap("priority")


async def test_a_swap_under_load_loses_nobody_and_answers_are_what_they_were(client: Client) -> None:
    async with asyncio.timeout(WITHIN_S):
        texts = [f"story number {n} of many" for n in range(6)]
        alone = [await client.tokens(text) for text in texts]
        before = (await client.shown())["schedule"]["swaps"]
        priorities = ("high", "normal", "low")
        tasks = [
            asyncio.create_task(client.tokens(texts[n % 6], **{PRIORITY_HEADER: priorities[n % 3]})) for n in range(48)
        ]
        for name in ("hybrid", "aegaeon", "adaptive", "slo_aware", "fifo", "priority"):
            assert (await client.swap(name))["name"] == name
        assert await asyncio.gather(*tasks) == [alone[n % 6] for n in range(48)]
        assert (await client.shown())["schedule"]["swaps"] == before + 6
        await client.idle()


async def test_who_leaves_while_waiting_leaves_nothing_and_is_counted(client: Client) -> None:
    async with asyncio.timeout(WITHIN_S):
        before = (await client.shown())["schedule"]["classes"]["low"]["left"]
        async with client.held():
            tasks = [
                asyncio.create_task(client.stream(f"g{n}", tokens=4, **{PRIORITY_HEADER: "low"})) for n in range(40)
            ]
            await client.waiting(low=40)
            for each in tasks[::2]:
                each.cancel()
            await client.waiting(low=20)
        await asyncio.gather(*tasks[1::2])
        assert (await client.shown())["schedule"]["classes"]["low"]["left"] == before + 20
        await client.idle()


async def test_past_its_bound_the_instance_says_so_at_once(client: Client) -> None:
    async with asyncio.timeout(WITHIN_S):
        async with client.held():
            tasks = [asyncio.create_task(client.stream(f"b{n}", tokens=1)) for n in range(BOUND - BATCH)]
            await client.waiting(normal=BOUND - BATCH)
            body = {"model": "m", "prompt": "one too many", "max_tokens": 1}
            async with client.session.post(f"{client.url}/v1/completions", json=body) as answer:
                assert (answer.status, answer.headers["retry-after"]) == (429, "1")
                assert (await answer.json())["error"]["code"] == "engine_saturated"
        await asyncio.gather(*tasks)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"name": "best"}, "unknown strategy 'best'; known: fifo, priority"),
        ({"name": "fifo", "tier": "ddr"}, "a strategy of the schedule has no tier"),
        ({"name": "priority", "params": {"ageing_bound_s": 0}}, "ageing_bound_s is 0; allowed"),
        ({"name": "priority", "params": {"speed": 1}}, "has no parameter 'speed'"),
    ],
)
async def test_a_strategy_that_cannot_be_is_refused_and_nothing_changes(
    client: Client, change: dict[str, Any], why: str
) -> None:
    before = (await client.shown())["name"]
    async with client.session.put(f"{client.url}{POLICY_PATH}", json={"kind": "schedule", **change}) as answer:
        assert answer.status == 400
        assert why in (await answer.json())["error"]["message"]
    assert (await client.shown())["name"] == before


async def test_a_bad_header_is_a_400(client: Client) -> None:
    body = {"model": "m", "prompt": "x", "max_tokens": 1}
    headers = {PRIORITY_HEADER: "urgent"}
    async with client.session.post(f"{client.url}/v1/completions", json=body, headers=headers) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == PRIORITY_HEADER


async def test_the_queues_series_are_on_metrics(client: Client) -> None:
    await client.stream("m", tokens=1, **{PRIORITY_HEADER: "low"})
    async with asyncio.timeout(60):
        while True:
            async with client.session.get(f"{client.url}/metrics") as answer:
                text = await answer.text()
            if "kvgate_engine_up 1.0" in text:
                break
            await asyncio.sleep(0.2)
    for line in (
        'kvgate_engine_waiting_requests{priority="high"} 0.0',
        'kvgate_engine_schedule_in_charge{strategy="priority"} 1.0',
        "kvgate_engine_queue_errors_total 0.0",
        "kvgate_engine_queue_repairs_total 0.0",
    ):
        assert line in text
    for name in ("queue_wait_seconds_bucket", "queue_wait_seconds_count", "queue_promotions_total", "queue_left_total"):
        assert f"kvgate_engine_{name}" in text
    assert 'kv_policy_swaps_total{kind="schedule",tier=""}' in text
