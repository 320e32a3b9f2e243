"""Three gateways behind a real nginx, with a real Redis: one address, one fleet, one quota; whoever is killed."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from gateway.state import Kind
from tests.support.admin import ADMIN_KEY, Admin
from tests.support.fleet import CHAT, chat, script
from tests.support.people import put
from tests.support.replicas import Replicas, instances_setting, kill_nginx, replicas
from tests.support.running_gateway import GatewayClient, eventually
from tests.support.scripted_engine import ScriptedEngine

REGISTRATION_KEY = "registration-key-for-tests-1"
KEYS = '[{"key": "free-key", "tenant": "free"}, {"key": "acme-key", "tenant": "acme"}]'


class Deployment:
    """Clients of nginx, and of each gateway behind it."""

    def __init__(self, running: Replicas, engines: dict[str, ScriptedEngine], session: aiohttp.ClientSession) -> None:
        self.running = running
        self.engines = engines
        self.front = GatewayClient(running.url, session)
        self.each = [GatewayClient(f"http://127.0.0.1:{one.port}", session) for one in running.gateways]

    async def status(self, key: str = "free-key", **headers: str) -> int:
        try:
            async with self.front.post(CHAT, chat(), authorization=f"Bearer {key}", **headers) as answer:
                await answer.read()
                return int(answer.status)
        except aiohttp.ClientError:
            return 0

    async def statuses(self, count: int, key: str) -> Counter[int]:
        return Counter(await asyncio.gather(*(self.status(key) for _ in range(count))))

    async def all_know(self, names: set[str]) -> None:
        """Wait until every gateway has just these instances, healthy."""
        seen: list[object] = []

        async def known() -> bool:
            seen.clear()
            for one in self.each:
                try:
                    seen.append((await Admin(one).ok("GET", "/instances"))["data"])
                except aiohttp.ClientError as error:
                    seen.append(error)
            return all(
                isinstance(found, list)
                and {each["id"] for each in found if each["state"] == "healthy" and not each["draining"]} == names
                for found in seen
            )

        try:
            await eventually(known, 60.0)
        except TimeoutError:
            pytest.fail(f"not all gateways know just {names}: {seen}")

    async def all_answer(self) -> None:
        async def answering() -> bool:
            return await self.status() == 200

        await eventually(answering, 60.0)


@asynccontextmanager
async def deployment(folder: Path, *, workers: int = 1) -> AsyncIterator[Deployment]:
    async with AsyncExitStack() as stack:
        engines = {name: ScriptedEngine(kv=False) for name in ("a", "b", "c")}
        for engine in engines.values():
            await stack.enter_async_context(engine.started())
        settings = {
            "KVGATE_INSTANCES": instances_setting({"a": engines["a"].url}),
            "KVGATE_API_KEYS": KEYS,
            "KVGATE_WORKERS": str(workers),
            "KVGATE_ADMIN_KEY": ADMIN_KEY,
            "KVGATE_REGISTRATION_KEY": REGISTRATION_KEY,
            "KVGATE_STORE_POLL_S": "0.2",
            "KVGATE_HEALTH_INTERVAL_S": "0.2",
            "KVGATE_DRAIN_TIMEOUT_S": "2",
        }
        made = replicas(folder, 3, settings)
        running = await asyncio.to_thread(made.__enter__)
        stack.push_async_callback(asyncio.to_thread, made.__exit__, None, None, None)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        yield Deployment(running, engines, session)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
async def test_no_request_is_lost_while_one_gateway_after_the_other_is_restarted(tmp_path: Path, workers: int) -> None:
    async with deployment(tmp_path, workers=workers) as all_of:
        await all_of.all_know({"a"})
        stop = asyncio.Event()
        seen: Counter[int] = Counter()

        async def client() -> None:
            while not stop.is_set():
                seen[await all_of.status()] += 1

        clients = [asyncio.create_task(client()) for _ in range(4)]
        for gateway in all_of.running.gateways:
            before = seen[200]
            await asyncio.to_thread(gateway.end)
            await asyncio.to_thread(gateway.again)
            await all_of.all_know({"a"})
            await eventually(lambda before=before: seen[200] > before + 20, 60.0)
        stop.set()
        await asyncio.gather(*clients)
        assert seen.keys() == {200}


@pytest.mark.slow
async def test_gateways_behind_nginx_are_one_and_their_state_survives_any_kill(tmp_path: Path) -> None:
    await put(tmp_path, Kind.QUOTA, "acme", requests_per_min=10)
    async with deployment(tmp_path) as all_of:
        front, running = all_of.front, all_of.running
        await all_of.all_know({"a"})

        # What is said to one of them through nginx, all of them know: an operator's word, and an instance's own.
        await Admin(front).ok("POST", "/instances", {"id": "b", "url": all_of.engines["b"].url})
        lease = {"url": all_of.engines["c"].url, "ttl_s": 600}
        await Admin(front, REGISTRATION_KEY).ok("PUT", "/instances/c/lease", lease)
        await all_of.all_know({"a", "b", "c"})

        # One quota, exactly.
        assert await all_of.statuses(100, "acme-key") == {200: 10, 429: 90}

        # A stream is not held back by nginx: its first event is here while the engine has not ended it.
        how = script(chunks=4, stall_after=2)
        async with front.post(CHAT, chat(stream=True), authorization="Bearer free-key", x_script=how) as answer:
            assert b"tok0" in await answer.content.readany()
            assert sum(engine.active for engine in all_of.engines.values()) == 1
        await eventually(lambda: not any(engine.active for engine in all_of.engines.values()))

        # Series belong to one gateway, so nginx doesn't give them.
        async with front.get("/metrics") as answer:
            assert answer.status == 404

        # A gateway is killed: the others go on, with the same quota; it comes back and knows all.
        victim = running.gateways[1]
        await asyncio.to_thread(victim.kill)
        await all_of.all_answer()
        assert await all_of.statuses(20, "free-key") == {200: 20}
        assert await all_of.statuses(6, "acme-key") == {429: 6}
        await asyncio.to_thread(victim.again)
        await all_of.all_know({"a", "b", "c"})

        # nginx is killed and comes back.
        await asyncio.to_thread(kill_nginx, running.nginx)
        assert await all_of.status() == 0
        await asyncio.to_thread(running.nginx.again)
        await all_of.all_answer()
        assert await all_of.statuses(3, "acme-key") == {429: 3}

        # Redis is killed: tenants without a quota are served, no instance is lost; it comes back empty, likewise.
        await asyncio.to_thread(running.redis.kill)
        assert await all_of.statuses(6, "free-key") == {200: 6}
        assert await all_of.status("acme-key") == 503
        await asyncio.to_thread(running.redis.again)

        async def counted_again() -> bool:
            return await all_of.status("acme-key") == 200

        await eventually(counted_again)
        await all_of.all_know({"a", "b", "c"})

        # An instance says goodbye to one of them, and all let it go.
        await Admin(front, REGISTRATION_KEY).ok("DELETE", "/instances/c/lease")
        await all_of.all_know({"a", "b"})

        # All gateways are gone: an answer in the API's own shape, and again a service when they are back.
        for gateway in running.gateways:
            await asyncio.to_thread(gateway.kill)
        async with front.post(CHAT, chat()) as answer:
            assert answer.status == 503
            assert (await answer.json())["error"]["code"] == "no_gateway"
            assert answer.headers["retry-after"] == "2"
        for gateway in running.gateways:
            await asyncio.to_thread(gateway.again)
        await all_of.all_answer()
        await all_of.all_know({"a", "b"})
