"""A deployment whose parts are killed, stopped and continued at random, and what may never happen to it."""

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp
import psutil
import psycopg

from kvcontrol.core.policy_control import POLICY_PATH
from kvcontrol.core.tier_control import QUOTAS_PATH
from tests.support.admin import ADMIN_KEY
from tests.support.databases import Server, free_port, postgres_server, postgres_url, redis_server
from tests.support.fleet import CHAT, chat
from tests.support.replicas import gateway_server, instances_setting
from tests.support.running_gateway import eventually
from tests.support.scripted_engine import MODEL

TRUST_S = 5.0
STORE_LIMIT_S = 1.0
BOUND_S = TRUST_S + 2 * STORE_LIMIT_S + 8.0
"""How long after its revocation a key may be accepted at most, with what a busy machine adds to it."""

HEALED_S = 120.0
GATEWAYS = ("one", "two")
ENGINES = ("a", "b", "c")
QUOTA = {"requests_per_min": 10**9}
_CALL_S = 30.0
_POLICIES = ("lru", "fifo", "s3fifo")
_GONE = (aiohttp.ClientError, TimeoutError, OSError)


@dataclass(slots=True)
class Seen:
    """What clients and operators were answered."""

    statuses: Counter[int] = field(default_factory=Counter)
    made: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    late: list[str] = field(default_factory=list)
    attacks: Counter[str] = field(default_factory=Counter)


class Deployment:
    """Two gateways, one of them of two workers, on one PostgreSQL and one Redis, before three simulated engines: each
    a process of its own.
    """

    def __init__(self, servers: Mapping[str, Server], dice: random.Random) -> None:
        self.servers = servers
        self.seen = Seen()
        self._dice = dice
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=_CALL_S)
        )

    async def close(self) -> None:
        await self._session.close()

    @property
    def urls(self) -> list[str]:
        return [url_of(self.servers[name]) for name in GATEWAYS]

    async def chat(self, url: str, key: str) -> int:
        """Return the status of a chat, 0 where there was none."""
        try:
            async with self._session.post(
                url + CHAT, json=chat(), headers={"authorization": f"Bearer {key}"}
            ) as answer:
                await answer.read()
                return answer.status
        except _GONE:
            return 0

    async def admin(
        self, method: str, path: str, body: object = None, *, url: str | None = None, key: str | None = None
    ) -> tuple[int, object]:
        """Ask a gateway as an operator; the status is 0 where there was no answer. ``key`` is an idempotency key."""
        headers = {"authorization": f"Bearer {ADMIN_KEY}"} | ({"idempotency-key": key} if key else {})
        where = url or self._dice.choice(self.urls)
        try:
            async with self._session.request(method, f"{where}/admin/v1{path}", json=body, headers=headers) as answer:
                text = await answer.text()
                return answer.status, json.loads(text) if text else None
        except _GONE:
            return 0, None

    async def load(self, key: str) -> None:
        while True:
            self.seen.statuses[await self.chat(self._dice.choice(self.urls), key)] += 1

    async def change(self) -> None:
        """Make tenants: some refusals are left, the others are sent again with their idempotency keys until they are
        done.
        """
        for number in range(1_000_000):
            name = f"t{number}"
            sure = True
            while True:
                status, said = await self.admin("PUT", f"/tenants/{name}", {}, key=f"make-{name}")
                if status == 200:
                    self.seen.made.add(name)
                    break
                code = said["error"]["code"] if isinstance(said, dict) else None
                sure = sure and code == "store_unavailable"
                if sure and self._dice.random() < 0.5:
                    self.seen.refused.add(name)
                    break
                await asyncio.sleep(0.2)

    async def swap(self) -> None:
        while True:
            await self.admin("PUT", "/policies/eviction", {"name": self._dice.choice(_POLICIES)})
            await asyncio.sleep(self._dice.uniform(0.2, 2))

    async def budget(self) -> None:
        """Change, and now and then take back, what of the engines' tiers is guaranteed to a tenant."""
        while True:
            share = self._dice.choice((0, 1, 2, 3))
            kv = {"DDR": {"guaranteed_bytes": share << 24, "weight": 1 + share}} if share else {}
            await self.admin("PUT", "/quotas/acme", {**QUOTA, "kv": kv})
            await asyncio.sleep(self._dice.uniform(0.2, 2))

    async def revoke(self) -> None:
        """Make keys, revoke them, and try them for longer than they may be accepted."""
        while True:
            status, said = await self.admin("POST", "/keys", {"tenant": "acme"})
            if status == 201 and isinstance(said, dict):
                while (await self.admin("DELETE", f"/keys/{said['id']}"))[0] != 200:
                    await asyncio.sleep(0.2)
                await self._try(said["key"], time.monotonic())
            await asyncio.sleep(0.5)

    async def _try(self, key: str, revoked_s: float) -> None:
        while time.monotonic() < revoked_s + BOUND_S + 2:
            for url in self.urls:
                sent_s = time.monotonic()
                if await self.chat(url, key) == 200 and sent_s > revoked_s + BOUND_S:
                    self.seen.late.append(f"{url}: {sent_s - revoked_s:.1f} s after its revocation")
            await asyncio.sleep(0.3)

    async def attack(self, seconds: float) -> None:
        """Kill, stop and continue one part after the other; all are there again at the end."""
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s:
            await asyncio.sleep(self._dice.uniform(0.5, 2))
            what, strike = self._dice.choice(self._attacks())
            self.seen.attacks[what] += 1
            await strike()

    def _attacks(self) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
        strikes: list[tuple[str, Callable[[], Awaitable[None]]]] = [("kill worker", self._kill_worker)]
        for name, server in self.servers.items():
            strikes.append((f"kill {name}", partial(self._kill, name)))
            strikes.append((f"stop {name}", partial(self._stop, server)))
        return strikes

    async def _kill(self, name: str) -> None:
        server = self.servers[name]
        await asyncio.to_thread(kill_tree, server)
        await asyncio.sleep(self._dice.uniform(0, 2))
        await asyncio.to_thread(server.again)
        if name == "postgres":
            await eventually(lambda: asyncio.to_thread(accepting, server), HEALED_S)
        elif name in GATEWAYS + ENGINES:
            await eventually(lambda: self._alive(server, "/health" if name in ENGINES else "/healthz"), HEALED_S)

    async def _alive(self, server: Server, path: str) -> bool:
        try:
            async with self._session.get(url_of(server) + path) as answer:
                return answer.status == 200
        except _GONE:
            return False

    async def _stop(self, server: Server) -> None:
        family = processes(server)
        for each in family:
            signalled(each, signal.SIGSTOP)
        await asyncio.sleep(self._dice.uniform(0.3, 4))
        for each in family:
            signalled(each, signal.SIGCONT)

    async def _kill_worker(self) -> None:
        workers = processes(self.servers["two"])[1:]
        if workers:
            signalled(self._dice.choice(workers), signal.SIGKILL)

    async def healed(self) -> None:
        """Wait until both gateways are ready and nothing is wrong or under way with them."""

        async def well() -> bool:
            for url in self.urls:
                status, said = await self.admin("GET", "/status", url=url)
                if status != 200 or not isinstance(said, dict) or said["problems"] or said["usable"] != 3:
                    return False
            status, said = await self.admin("GET", "/audit?limit=1000")
            return isinstance(said, dict) and all(each["outcome"] != "begun" for each in said["data"])

        await eventually(well, HEALED_S)

    async def one_fleet(self) -> None:
        """Wait until all engines run the policy and keep the KV budgets that are stored."""
        differs = ""

        async def same() -> bool:
            nonlocal differs
            status, said = await self.admin("GET", "/policies/eviction")
            _, quota = await self.admin("GET", "/quotas/acme")
            if not isinstance(said, dict) or not isinstance(quota, dict):
                return False
            policies, budgets = set(), []
            for name in ENGINES:
                policies.add(await self._policy(self.servers[name]))
                budgets.append(await self._guarantees(self.servers[name]))
            wanted = [each["guaranteed_bytes"] for each in quota["kv"].values()]
            as_stored = status == 404 or policies == {said["name"]}
            differs = f"stored policy {said}, quota {wanted}; engines run {policies} and keep {budgets}"
            return len(policies) == 1 and as_stored and budgets == [wanted] * len(ENGINES)

        try:
            await eventually(same, HEALED_S)
        except TimeoutError:
            raise AssertionError(f"no one fleet: {differs}") from None

    async def _policy(self, engine: Server) -> str:
        async with self._session.get(url_of(engine) + POLICY_PATH) as answer:
            return next(str(each["name"]) for each in (await answer.json())["policies"] if each["kind"] == "eviction")

    async def _guarantees(self, engine: Server) -> list[int]:
        """What an engine keeps for tenants of which it was told."""
        async with self._session.get(url_of(engine) + QUOTAS_PATH) as answer:
            tenants = (await answer.json())["tiers"]["DDR"]
        return [each["quota"]["guaranteed_bytes"] for each in tenants.values() if each["changed"]]


def url_of(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


def processes(server: Server) -> list[psutil.Process]:
    """Return a server's process and those below it."""
    parent = psutil.Process(server.process.pid)
    return [parent, *parent.children(recursive=True)]


def accepting(server: Server) -> bool:
    """Whether PostgreSQL takes connections: it listens before it does."""
    try:
        psycopg.connect(postgres_url(server), connect_timeout=5).close()
    except psycopg.Error:
        return False
    return True


def signalled(process: psutil.Process, number: int) -> None:
    """Send a signal, to a process that may be gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def kill_tree(server: Server) -> None:
    """SIGKILL a server and all below it, and wait until they are gone."""
    family = processes(server)
    for each in family:
        signalled(each, signal.SIGKILL)
    server.process.wait()
    psutil.wait_procs(family, timeout=30)


@asynccontextmanager
async def deployed(folder: Path, seed: int, model: Path) -> AsyncIterator[Deployment]:
    """Run one, whose engines have the tokenizer of ``model``; its gateways are ready."""
    async with AsyncExitStack() as stack:
        made = _servers(folder, model)
        servers = await asyncio.to_thread(made.__enter__)
        stack.push_async_callback(asyncio.to_thread, made.__exit__, None, None, None)
        deployment = Deployment(servers, random.Random(seed))  # noqa: S311 - what is attacked
        stack.push_async_callback(deployment.close)
        await deployment.healed()
        yield deployment


def _engine(folder: Path, name: str, model: Path) -> Server:
    port = free_port()
    command = [sys.executable, "-m", "engines.sim", "--model", str(model), "--model-name", MODEL]
    return Server(
        [*command, "--port", str(port), "--ddr-blocks", "1000", "--answer-tokens", "8"],
        port,
        folder / f"{name}.log",
        user=None,
        stop=signal.SIGTERM,
        environment=dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


@contextmanager
def _servers(folder: Path, model: Path) -> Iterator[dict[str, Server]]:
    with ExitStack() as stack:
        postgres, redis = stack.enter_context(postgres_server()), stack.enter_context(redis_server())
        engines = {}
        for name in ENGINES:
            engines[name] = _engine(folder, name, model)
            stack.callback(engines[name].end)
        settings = {
            "KVGATE_STORE_URL": postgres_url(postgres),
            "KVGATE_REDIS_URL": f"redis://127.0.0.1:{redis.port}/0",
            "KVGATE_INSTANCES": instances_setting({name: url_of(each) for name, each in engines.items()}),
            "KVGATE_API_KEYS": json.dumps([{"key": "k", "tenant": "acme"}]),
            "KVGATE_ADMIN_KEY": ADMIN_KEY,
            "KVGATE_SALT_SECRET": "the same secret everywhere",
            "KVGATE_STORE_POLL_S": "0.2",
            "KVGATE_STORE_TIMEOUT_S": str(STORE_LIMIT_S),
            "KVGATE_STORE_TRUST_S": str(TRUST_S),
            "KVGATE_CONTROL_TIMEOUT_S": "3",
            "KVGATE_HEALTH_INTERVAL_S": "0.2",
            "KVGATE_HEALTH_TIMEOUT_S": "2",
        }
        servers = {"postgres": postgres, "redis": redis, **engines}
        for workers, name in enumerate(GATEWAYS, 1):
            own = settings | {"KVGATE_STATE_DIR": str(folder / name), "KVGATE_WORKERS": str(workers)}
            server = gateway_server(folder, name, own)
            stack.callback(server.end)
            servers[name] = server
        yield servers


__all__ = ["BOUND_S", "QUOTA", "Deployment", "Seen", "deployed"]
