"""Scripted engines with the gateway in front of them."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.running_gateway import RunningGateway, running_gateway
from tests.support.scripted_engine import MODEL, ScriptedEngine

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class Fleet(NamedTuple):
    gateway: RunningGateway
    engines: dict[str, ScriptedEngine]

    @property
    def active(self) -> int:
        return sum(engine.active for engine in self.engines.values())

    @property
    def aborted(self) -> int:
        return sum(engine.aborted for engine in self.engines.values())

    @property
    def requests(self) -> int:
        return sum(len(engine.requests) for engine in self.engines.values())

    def last_headers(self) -> dict[str, str]:
        """What the engine of the only request was sent."""
        return next(engine.headers[-1] for engine in self.engines.values() if engine.headers)

    def last_body(self) -> bytes:
        return next(engine.bodies[-1] for engine in self.engines.values() if engine.bodies)


def chat(**more: object) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **more}


def script(**fields: object) -> str:
    """The ``x-script`` header that makes an engine do this."""
    return json.dumps(fields)


def instances(engines: dict[str, ScriptedEngine]) -> list[dict[str, str]]:
    return [{"id": name, "url": engine.url} for name, engine in engines.items()]


@asynccontextmanager
async def running_fleet(
    state_dir: Path, engines: dict[str, ScriptedEngine] | None = None, **settings: Any
) -> AsyncIterator[Fleet]:
    """Run the engines (two by default) and a gateway that finds all of them usable."""
    engines = engines or {"a": ScriptedEngine(), "b": ScriptedEngine()}
    async with AsyncExitStack() as stack:
        for engine in engines.values():
            await stack.enter_async_context(engine.started())
        gateway = await stack.enter_async_context(running_gateway(state_dir, instances=instances(engines), **settings))
        await gateway.usable(len(engines))
        yield Fleet(gateway, engines)


__all__ = ["CHAT", "COMPLETIONS", "Fleet", "chat", "instances", "running_fleet", "script"]
