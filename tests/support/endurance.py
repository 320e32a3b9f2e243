"""Load of all kinds on a gateway process for as long as one likes, and what it has left when all is over.

Engines, clients and the measuring live in the test's own event loop; the gateway is a process of its own, so its
memory, its open files and its tasks are its alone.
"""

import asyncio
import json
import os
import random
import re
import resource
import sys
from asyncio.subprocess import DEVNULL, Process
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tests.support.fleet import COMPLETIONS, script
from tests.support.running_gateway import eventually
from tests.support.scripted_engine import MODEL, ScriptedEngine

DEADLINE_S = 60.0
"""Within this every request is over, however it ends: the gateway's own bounds are a few seconds in these runs."""

FAULTS: tuple[dict[str, object], ...] = (
    {"status": 500},
    {"status": 503},
    {"die_after": 0},
    {"die_after": 2},
    {"stall_after": 2},
    {"no_done": True},
    {"ttft_s": 3600},
    {"error_event": True},
)


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds."""

    rss_bytes: int
    files: int
    tasks: int


@dataclass(slots=True)
class Tally:
    """How requests ended."""

    ends: Counter[str] = field(default_factory=Counter)
    late: int = 0
    odd: list[str] = field(default_factory=list)


class Gateway:
    """A gateway process, and a client to it without limits."""

    def __init__(self, process: Process, url: str, session: aiohttp.ClientSession) -> None:
        self.process = process
        self.url = url
        self.session = session

    async def metrics(self) -> dict[str, float]:
        async with self.session.get(f"{self.url}/metrics") as answer:
            text = await answer.text()
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    async def held(self) -> Held:
        process = psutil.Process(self.process.pid)
        tasks = (await self.metrics())["kvgate_tasks"]
        return Held(process.memory_info().rss, process.num_fds(), int(tasks))

    async def at_rest(self, fleet: list[ScriptedEngine]) -> None:
        """Wait until nothing runs any more, here or at the engines, and the gateway says so."""
        await eventually(lambda: all(engine.active == 0 for engine in fleet), DEADLINE_S)

        async def counted() -> bool:
            values = await self.metrics()
            return not any(
                value
                for name, value in values.items()
                if name.startswith(("kvgate_requests_in_flight", "kvgate_requests_waiting"))
            )

        await eventually(counted, DEADLINE_S)


@contextmanager
def many_files() -> Iterator[int]:
    """Raise this process's limit of open files as far as it goes; yields it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@asynccontextmanager
async def gateway_process(folder: Path, fleet: dict[str, ScriptedEngine], **settings: Any) -> AsyncIterator[Gateway]:
    """Run ``python -m gateway`` in front of these engines; its log goes to ``folder``."""
    values = {
        "state_dir": str(folder),
        "port": "0",
        "instances": json.dumps([{"id": name, "url": engine.url} for name, engine in fleet.items()]),
        "health_interval_s": "0.5",
        "log_level": "info",
        **{name: str(value) for name, value in settings.items()},
    }
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVGATE_")}
    environment |= {f"KVGATE_{name.upper()}": value for name, value in values.items()}
    log = folder / "gateway.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", env=environment, stdin=DEVNULL, stdout=output, stderr=output
        )
    try:
        found: list[str] = []

        def listening() -> bool:
            assert process.returncode is None, log.read_text()
            found.extend(re.findall(r"listening on (http://\S+)", log.read_text()))
            return bool(found)

        await eventually(listening, DEADLINE_S)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
            gateway = Gateway(process, found[0], session)

            async def usable() -> bool:
                async with session.get(f"{gateway.url}/readyz") as answer:
                    return bool((await answer.json())["usable"] == len(fleet))

            await eventually(usable, DEADLINE_S)
            yield gateway
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), DEADLINE_S)
            except TimeoutError:
                process.kill()
                await process.wait()


@asynccontextmanager
async def engines(*names: str) -> AsyncIterator[dict[str, ScriptedEngine]]:
    async with AsyncExitStack() as stack:
        yield {name: await stack.enter_async_context(ScriptedEngine().started()) for name in names}


class Mix:
    """Clients of which 30 % leave early and 5 % have little time, engines that fail 5 % of what they get."""

    def __init__(self, gateway: Gateway, *, seed: int = 1) -> None:
        self._gateway = gateway
        self._chance = random.Random(seed)  # noqa: S311 - a load, no secret
        self.tally = Tally()

    async def run(self, *, clients: int, seconds: float) -> None:
        """Let so many clients ask one request after the other."""
        until_s = asyncio.get_running_loop().time() + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self._client(until_s))

    async def _client(self, until_s: float) -> None:
        clock = asyncio.get_running_loop().time
        while clock() < until_s:
            try:
                async with asyncio.timeout(DEADLINE_S):
                    await self._one()
            except TimeoutError:
                self.tally.late += 1

    async def _one(self) -> None:
        chance = self._chance
        how: dict[str, object] = {"chunks": 6, "chunk_s": 0.01}
        faulty = chance.random() < 0.05
        if faulty:
            how |= chance.choice(FAULTS)
        leaves_after = chance.choice((0.0, 0.005, 0.03)) if chance.random() < 0.3 else None
        stream = chance.random() < 0.7
        family, member = chance.randrange(25), chance.randrange(20)  # a scripted cache never evicts, so few prompts
        prompt = [family * 1000 + number for number in range(64)] + [member * 100 + number for number in range(64)]
        body = {"model": MODEL, "prompt": prompt, "stream": stream}
        headers = {"x-script": script(**how)}
        if chance.random() < 0.05:
            headers["x-kvgate-timeout-s"] = chance.choice(("0.01", "0.05", "0.5"))
        asked = asyncio.create_task(self._ask(body, headers))
        try:
            if leaves_after is not None:
                await asyncio.sleep(leaves_after)
                asked.cancel()
            await asked
        except asyncio.CancelledError:
            if not asked.cancelled():
                raise
            self.tally.ends["left"] += 1
        finally:
            asked.cancel()

    async def _ask(self, body: dict[str, Any], headers: dict[str, str]) -> None:
        try:
            async with self._gateway.session.post(
                self._gateway.url + COMPLETIONS, json=body, headers=headers
            ) as answer:
                text = await answer.text()
        except aiohttp.ClientError as error:
            self.tally.odd.append(f"{type(error).__name__}: {error}")
            return
        ended = answer.status != 200 or not body["stream"] or text.endswith("data: [DONE]\n\n")
        failed = body["stream"] and '"error"' in text
        if not ended or answer.status not in {200, 429, 500, 502, 503, 504}:
            self.tally.odd.append(f"{answer.status} {text[-200:]}")
        self.tally.ends[f"{answer.status}{' error event' if answer.status == 200 and failed else ''}"] += 1


class Shaky:
    """An engine that comes and goes, always at the same address."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine()
        self._life = AsyncExitStack()

    async def start(self) -> None:
        port = self.engine.port if self.engine.url else 0
        await self._life.enter_async_context(self.engine.started(port))

    async def stop(self) -> None:
        await self._life.aclose()

    async def flap(self, every_s: float) -> None:
        """For ever: up for ``every_s``, gone for half of that. To be cancelled; leaves it as it is then."""
        while True:
            await asyncio.sleep(every_s)
            await self.stop()
            await asyncio.sleep(every_s / 2)
            await self.start()


__all__ = ["DEADLINE_S", "Gateway", "Held", "Mix", "Shaky", "engines", "gateway_process", "many_files"]
