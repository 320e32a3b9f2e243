"""Simulated instances: as processes of their own, or on sockets inside the test's own event loop."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import uvicorn

from engines.sim.faults import Faults
from engines.sim.instance import InstanceSpec, SimInstance
from engines.sim.profile import load_profile
from engines.sim.server import Server
from engines.sim.text import SimTokenizer
from tests.support.instance import Instance, free_port
from tests.support.running_gateway import DEADLINE_S, RunningGateway, eventually, running_gateway
from tests.support.warm_process import Warm


class SimulatedInstance(Instance):
    """``with SimulatedInstance.serve(...)`` yields once it is healthy; quick steps, so that tests don't wait."""

    @classmethod
    def serve(cls, model: Path, log: Path, *options: str) -> Self:
        """Start one that serves ``m`` in blocks of 16 tokens."""
        port = free_port()
        words = [
            *("--model", str(model), "--model-name", "m", "--port", str(port)),
            *("--profile", "h100-7b", "--block-tokens", "16", "--hbm-blocks", "1024", "--slow", "0.02", *options),
        ]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        with log.open("wb") as output:
            process = Warm.mine().start("engines.sim", words, environment=environment, output=output)
        return cls(process, port, log)


class Simulated(NamedTuple):
    """One that listens at ``url``."""

    instance: SimInstance
    url: str


@asynccontextmanager
async def simulated(
    tokenizer: SimTokenizer, *, faults: Faults | None = None, **shape: object
) -> AsyncIterator[Simulated]:
    """Serve ``m`` in blocks of 16 tokens while the block runs; answers have 8 tokens where nobody says."""
    profile = load_profile("h100-7b")
    engine = replace(profile.engine.with_block_tokens(16), **{"hbm_blocks": 1024} | shape)  # type: ignore[arg-type]
    faults = faults or Faults(slow=0.02)
    instance = SimInstance(InstanceSpec(profile=replace(profile, engine=engine), model="m", faults=faults))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    app = Server(instance, tokenizer, answer_tokens=8).app()
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await eventually(lambda: server.started or task.done())
        yield Simulated(instance, f"http://127.0.0.1:{listener.getsockname()[1]}")
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, DEADLINE_S)
        listener.close()


@asynccontextmanager
async def simulated_fleet(
    tokenizer: SimTokenizer,
    model: Path,
    state_dir: Path,
    faults: Mapping[str, Faults],
    *,
    settings: Mapping[str, Any] | None = None,
    **shape: object,
) -> AsyncIterator[tuple[RunningGateway, dict[str, Simulated]]]:
    """A gateway with these settings before simulated instances of these names."""
    async with AsyncExitStack() as stack:
        engines = {
            name: await stack.enter_async_context(simulated(tokenizer, faults=each, **shape))
            for name, each in faults.items()
        }
        instances = [{"id": name, "url": engine.url} for name, engine in engines.items()]
        more = dict(settings or {})
        gateway = await stack.enter_async_context(
            running_gateway(state_dir, instances=instances, tokenizer=model, **more)
        )
        await gateway.usable(len(engines))
        yield gateway, engines


__all__ = ["Simulated", "SimulatedInstance", "simulated", "simulated_fleet"]
