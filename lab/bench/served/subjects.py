"""What ``kvgate bench served`` measures: our stack, stock LMDeploy, and servers that run already."""

import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from kvgate.boards import StartBoard
from kvgate.display import errors
from kvgate.engine.instance import CPU_BLOCK_TOKENS, CUDA_BLOCK_TOKENS
from kvgate.engine.model import Model
from kvgate.failure import CommandError
from kvgate.host.machine import gpus
from kvgate.host.ports import LOOPBACK, reserved_ports
from kvgate.supervision.child import ChildSpec
from kvgate.supervision.probe import HttpProbe
from kvgate.supervision.supervisor import State, Supervisor

OURS = "ours"
STOCK = "stock"
_AS_IT_IS: Mapping[str, str] = MappingProxyType({})
_STOP_S = 45.0
"""Longer than ``kvgate up`` gives its own children."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """What every engine that is started gets: KV blocks (None: its own choice), places in a batch; ours, tiers too.
    ``instances`` of ours are behind the gateway.
    """

    instances: int = 1
    kv_blocks: int | None
    max_batch_size: int
    ddr: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server that answers at ``url``; ``fleet_url`` lists our engines, None for others' servers."""

    name: str
    url: str
    fleet_url: str | None
    ready_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A server that runs already, by name."""

    name: str
    url: str

    @classmethod
    def parse(cls, text: str) -> "Peer":
        """Parse ``NAME=URL``; raises ``CommandError``."""
        name, _, url = text.partition("=")
        if not name.isidentifier() or name in {OURS, STOCK} or not url.startswith(("http://", "https://")):
            raise CommandError(
                f"--peer {text}: NAME=URL is allowed, with a name of letters, digits and _ other than {OURS}, {STOCK}",
                "for example --peer vllm=http://127.0.0.1:8100",
            )
        return cls(name=name, url=url.rstrip("/"))


@asynccontextmanager
async def serving(
    name: str, model: Model, pool: Pool, up_options: tuple[str, ...], settings: Mapping[str, str] = _AS_IT_IS
) -> AsyncIterator[Served]:
    """Start our stack or stock LMDeploy, give its address once it is ready, and stop it. Raises ``CommandError``.

    ``settings`` are more variables of its environment.
    """
    with tempfile.TemporaryDirectory(prefix="kvgate-bench-") as logs, reserved_ports(1) as (port,):
        spec = _ours(model, pool, port, up_options) if name == OURS else _stock(model, pool, port)
        spec = replace(spec, environment={**spec.environment, **settings})
        took: dict[str, float] = {}
        board = StartBoard(errors)

        def watch(child: str, state: State, seconds: float) -> None:
            took[child] = seconds
            board(child, state, seconds)

        async with HttpProbe() as probe, Supervisor([[spec]], Path(logs), probe, watch, grace_s=_STOP_S) as children:
            await children.until_ready()
            url = f"http://{LOOPBACK}:{port}"
            fleet = f"{url}/dashboard/fleet" if name == OURS else None
            yield Served(name=name, url=url, fleet_url=fleet, ready_s=took.get(spec.name, 0.0))


def _ours(model: Model, pool: Pool, port: int, up_options: tuple[str, ...]) -> ChildSpec:
    options: dict[str, object | None] = {
        "--model": model.folder,
        "--model-name": model.name,
        "--instances": pool.instances,
        "--port": port,
        "--kv-blocks": pool.kv_blocks,
        "--max-batch-size": pool.max_batch_size,
        "--ddr": pool.ddr,
    }
    command = (sys.executable, "-m", "kvgate", "up", *_words(options), *up_options)
    return _spec(OURS, command, f"http://{LOOPBACK}:{port}/readyz")


def _stock(model: Model, pool: Pool, port: int) -> ChildSpec:
    options: dict[str, object | None] = {
        "--backend": "pytorch",
        "--model-name": model.name,
        "--server-name": LOOPBACK,
        "--server-port": port,
        "--cache-block-seq-len": CUDA_BLOCK_TOKENS if gpus() else CPU_BLOCK_TOKENS,
        "--num-gpu-blocks": pool.kv_blocks,
        "--max-batch-size": pool.max_batch_size,
        "--log-level": "WARNING",
    }
    launch = (sys.executable, "-m", "lab.bench.engine.stock", "serve", "api_server", str(model.folder))
    command = (*launch, *_words(options), "--enable-prefix-caching")
    return _spec(STOCK, command, f"http://{LOOPBACK}:{port}/v1/models")


def _words(options: dict[str, object | None]) -> tuple[str, ...]:
    return tuple(str(word) for pair in options.items() if pair[1] is not None for word in pair)


def _spec(name: str, command: tuple[str, ...], ready_url: str) -> ChildSpec:
    # A gateway's settings in the environment would make ours another stack than the options say.
    environment = {key: value for key, value in os.environ.items() if key not in {"KVGATE_API_KEYS", "KVGATE_CONFIG"}}
    return ChildSpec(
        name=name,
        command=command,
        environment={**environment, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"},
        ready_url=ready_url,
    )
