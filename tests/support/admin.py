"""An operator with the admin key."""

import io
import json
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

from gateway.state.sqlite import FILE_NAME
from tests.support.fleet import instances
from tests.support.running_gateway import GatewayClient, RunningGateway, running_gateway
from tests.support.scripted_engine import ScriptedEngine

ADMIN_KEY = "admin-key-for-tests-0123456789"


class Admin:
    """Calls ``/admin/v1`` and returns status, headers and body."""

    def __init__(self, gateway: GatewayClient, key: str | None = ADMIN_KEY) -> None:
        self._gateway = gateway
        self._key = key

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], Any]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if self._key is not None:
            named["authorization"] = f"Bearer {self._key}"
        sent = None
        if body is not None:
            named["content-type"] = "application/json"
            sent = io.BytesIO(json.dumps(body).encode())
        url = f"{self._gateway.url}/admin/v1{path}"
        async with self._gateway.session.request(method, url, headers=named, data=sent) as answer:
            text = await answer.text()
            said = await answer.json() if text else None
            return answer.status, {name.lower(): value for name, value in answer.headers.items()}, said

    async def ok(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """Return the body of an answer that must be a success."""
        status, _, said = await self.call(method, path, body, **headers)
        assert 200 <= status < 300, (status, said)
        return said


@asynccontextmanager
async def operated(state_dir: Path, engine: ScriptedEngine) -> AsyncIterator[tuple[RunningGateway, Admin]]:
    """Start an engine, named a, and a gateway with an admin key before it; yield the gateway, and its operator, once it
    has the engine.
    """
    async with (
        engine.started(),
        running_gateway(state_dir, instances=instances({"a": engine}), admin_key=ADMIN_KEY) as gateway,
    ):
        await gateway.usable(1)
        yield gateway, Admin(gateway)


@contextmanager
def locked_store(state_dir: Path) -> Iterator[None]:
    """Keep everybody from writing to the store while the block runs."""
    with closing(sqlite3.connect(state_dir / FILE_NAME, timeout=30, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield


__all__ = ["ADMIN_KEY", "Admin", "locked_store", "operated"]
