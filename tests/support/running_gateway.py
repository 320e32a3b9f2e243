"""The whole gateway on a real loopback socket, inside the test's own event loop."""

import asyncio
import io
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn

from gateway.http.protocol import bounded_protocol
from gateway.http.shutdown import GracefulServer
from gateway.settings import Settings
from gateway.wiring.app import build_app

DEADLINE_S = 60.0


class GatewayClient:
    """Where a gateway listens, and a session to talk to it."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    def post(self, path: str, body: Any, **headers: str) -> Any:
        """Return aiohttp's request context; ``x_script`` becomes the header ``x-script``."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if isinstance(body, bytes):
            return self.session.post(
                self.url + path, data=io.BytesIO(body), headers={"content-type": "application/json"} | named
            )
        return self.session.post(self.url + path, json=body, headers=named)

    def get(self, path: str, **headers: str) -> Any:
        return self.session.get(self.url + path, headers=headers)

    async def metric(self, line: str) -> float:
        """Return one series' value, 0 when it doesn't exist; ``line`` is the name with its labels."""
        async with self.get("/metrics") as answer:
            text = await answer.text()
        return next(
            (float(each.rpartition(" ")[2]) for each in text.splitlines() if each.rpartition(" ")[0] == line), 0.0
        )

    async def counted(self, line: str, value: float) -> None:
        """Wait until a series has this value: a request is settled just after its answer's last byte."""

        async def there() -> bool:
            return await self.metric(line) == value

        await eventually(there)

    async def usable(self, count: int) -> None:
        """Wait until so many instances are usable."""

        async def there() -> bool:
            async with self.get("/readyz") as answer:
                return (await answer.json())["usable"] == count

        await eventually(there)


class RunningGateway(GatewayClient):
    """One in the test's own process. ``stop`` is what a stop signal does; ``stopped`` waits for it."""

    def __init__(
        self, url: str, session: aiohttp.ClientSession, server: GracefulServer, task: "asyncio.Task[None]"
    ) -> None:
        super().__init__(url, session)
        self._server = server
        self._task = task

    def stop(self) -> None:
        self._server.should_exit = True

    async def stopped(self) -> None:
        await asyncio.wait_for(asyncio.shield(self._task), DEADLINE_S)


async def eventually(condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> None:
    """Ask again and again until ``condition`` (plain or async) holds; fails after a generous deadline."""
    async with asyncio.timeout(deadline_s):
        while True:
            answer = condition()
            if await answer if asyncio.iscoroutine(answer) else answer:
                return
            await asyncio.sleep(0.02)


@asynccontextmanager
async def running_gateway(state_dir: Path, **settings: Any) -> AsyncIterator[RunningGateway]:
    """Run a gateway with these settings, health checks every 50 ms, while the block runs.

    A machine that stands still for a few seconds takes no instance out of use: only a test about checks that take long
    bounds their time.
    """
    values = {
        "health_interval_s": 0.05,
        "health_timeout_s": 30.0,
        "shutdown_notice_s": 0.0,
        "state_dir": state_dir,
        "connect_timeout_s": 10.0,
    } | settings
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", 0))
    chosen = Settings(**values)
    app = build_app(chosen)
    server = GracefulServer(
        uvicorn.Config(
            app,
            http=bounded_protocol(
                header_timeout_s=chosen.server.header_timeout_s,
                body_timeout_s=chosen.requests.body_timeout_s,
                send_timeout_s=chosen.server.send_timeout_s,
                max_header_bytes=chosen.server.max_header_bytes,
            ),
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=max(1, round(chosen.server.keep_alive_timeout_s)),
        ),
        app.shutdown,
        notice_s=chosen.server.shutdown_notice_s,
        grace_s=min(1.0, chosen.server.shutdown_grace_s),
    )
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await eventually(lambda: server.started or task.done())
        if task.done():
            task.result()
        # The gateway drops a connection that is idle for some seconds; it is not to be used just then.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=1.0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
            yield RunningGateway(f"http://127.0.0.1:{listener.getsockname()[1]}", session, server, task)
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, DEADLINE_S)
        listener.close()


__all__ = ["DEADLINE_S", "GatewayClient", "RunningGateway", "eventually", "running_gateway"]
