"""Prompts that change hands between instances of two gateways, of which one is killed in the middle."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from kvcontrol.core.roles import EngineRole
from tests.integration.gateway.test_separated import engine
from tests.support.databases import Server, postgres, redis_server
from tests.support.fleet import COMPLETIONS
from tests.support.replicas import gateway_server, instances_setting
from tests.support.running_gateway import eventually
from tests.support.scripted_engine import MODEL, ScriptedEngine

EACH = 4
WITHIN_S = 60.0


class Replicas:
    """Two gateways on one PostgreSQL and one Redis, before an instance that prefills and two that answer."""

    def __init__(self, gateways: list[Server], engines: dict[str, ScriptedEngine]) -> None:
        self.gateways = gateways
        self.engines = engines
        self.prefill = engines["p"]
        self.answering = [engines["d0"], engines["d1"]]
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(WITHIN_S)
        )
        self._asked = 0

    async def close(self) -> None:
        await self._session.close()

    async def ready(self, gateway: Server) -> None:
        """Wait until a gateway uses all instances."""

        async def usable() -> bool:
            try:
                async with self._session.get(f"http://127.0.0.1:{gateway.port}/readyz") as answer:
                    return bool((await answer.json())["usable"] == len(self.engines))
            except aiohttp.ClientError:
                return False

        await eventually(usable, WITHIN_S)

    async def ask(self, gateway: Server, *, stream: bool) -> str:
        """Return the route of a whole answer to a new prompt, "lost" where there was none."""
        self._asked += 1
        prompt = [self._asked * 1000 + token for token in range(300)]
        body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "stream": stream}
        try:
            async with self._session.post(f"http://127.0.0.1:{gateway.port}{COMPLETIONS}", json=body) as answer:
                text = await answer.text()
                assert answer.status == 200, text
                assert "tok3" in text
                return answer.headers["x-kvgate-route"].partition(";pd=")[2]
        except aiohttp.ClientError:
            return "lost"

    def ask_all(self) -> list[list[asyncio.Task[str]]]:
        """Ask through every gateway, by streams and without."""
        return [
            [asyncio.create_task(self.ask(gateway, stream=number % 2 == 0)) for number in range(EACH)]
            for gateway in self.gateways
        ]

    def answering_now(self) -> int:
        return sum(each.active for each in self.answering)


@asynccontextmanager
async def replicas(folder: Path) -> AsyncIterator[Replicas]:
    engines = {"p": engine(EngineRole.PREFILL), "d0": engine(EngineRole.DECODE), "d1": engine(EngineRole.DECODE)}
    engines["d0"].fetches_from = engines["d1"].fetches_from = engines["p"]
    async with AsyncExitStack() as stack:
        for each in engines.values():
            await stack.enter_async_context(each.started())
        urls = {name: each.url for name, each in engines.items()}
        made = _gateways(folder, urls)
        gateways = await asyncio.to_thread(made.__enter__)
        stack.push_async_callback(asyncio.to_thread, made.__exit__, None, None, None)
        found = Replicas(gateways, engines)
        stack.push_async_callback(found.close)
        for gateway in gateways:
            await found.ready(gateway)
        yield found


@contextmanager
def _gateways(folder: Path, urls: dict[str, str]) -> Any:
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server())
        settings = {
            "KVGATE_STORE_URL": stack.enter_context(postgres()),
            "KVGATE_REDIS_URL": f"redis://127.0.0.1:{redis.port}/0",
            "KVGATE_SALT_SECRET": "the same secret everywhere",
            "KVGATE_INSTANCES": instances_setting(urls),
            "KVGATE_PD_MIN_UNCACHED_TOKENS": "100",
            "KVGATE_HEALTH_INTERVAL_S": "0.2",
        }
        gateways = []
        for name in ("one", "two"):
            gateway = gateway_server(folder, name, settings | {"KVGATE_STATE_DIR": str(folder / name)})
            stack.callback(gateway.end)
            gateways.append(gateway)
        yield gateways


async def ended(asked: list[list[asyncio.Task[str]]], *, killed: int) -> None:
    """Check that only the killed gateway's requests were lost, and that the others' prompts changed hands."""
    for number, tasks in enumerate(asked):
        expected = ["lost" if number == killed else "separated;prefill=p"] * EACH
        assert await asyncio.gather(*tasks) == expected


async def test_a_gateway_that_is_killed_while_prompts_change_hands_loses_its_own_requests_alone(tmp_path: Path) -> None:
    async with replicas(tmp_path) as deployed:
        prefill = deployed.prefill
        prefill.hold_lease_s = 2.0
        prefill.gate = asyncio.Event()
        asked = deployed.ask_all()
        await eventually(lambda: prefill.active == 2 * EACH, WITHIN_S)
        await asyncio.to_thread(deployed.gateways[0].kill)
        await eventually(lambda: prefill.active == EACH, WITHIN_S)  # the engine computes nothing for nobody
        prefill.gate.set()
        await ended(asked, killed=0)
        await eventually(lambda: not prefill.held, WITHIN_S)

        await asyncio.to_thread(deployed.gateways[0].again)
        await deployed.ready(deployed.gateways[0])
        for each in deployed.answering:
            each.fetch_gate = asyncio.Event()
        asked = deployed.ask_all()
        await eventually(lambda: deployed.answering_now() == 2 * EACH, WITHIN_S)
        await asyncio.to_thread(deployed.gateways[1].kill)
        await eventually(lambda: deployed.answering_now() == EACH, WITHIN_S)
        for each in deployed.answering:
            assert each.fetch_gate is not None
            each.fetch_gate.set()
        await ended(asked, killed=1)
        await eventually(lambda: not prefill.held, WITHIN_S)  # what nobody fetches ends with its lease

        await asyncio.to_thread(deployed.gateways[1].again)
        await deployed.ready(deployed.gateways[1])
        await ended(deployed.ask_all(), killed=-1)
        assert (prefill.held, prefill.active, deployed.answering_now()) == (set(), 0, 0)
