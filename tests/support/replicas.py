"""Several gateway processes behind a real nginx with the configuration that ships, sharing a store and a Redis."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from lab.bench.gateway.backend import nginx
from tests.support.databases import Server, free_port, redis_server

CONFIG = Path(__file__).parents[2] / "deploy" / "nginx" / "kvgate.conf"
_AROUND = """
daemon off;
worker_processes 2;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/proxy;
  uwsgi_temp_path {folder}/proxy;
  scgi_temp_path {folder}/proxy;
  include {folder}/kvgate.conf;
}}
"""


@dataclass(frozen=True, slots=True)
class Replicas:
    """``url`` is nginx'; each process may be killed and started again."""

    url: str
    nginx: Server
    gateways: list[Server]
    redis: Server


def gateway_server(folder: Path, name: str, settings: Mapping[str, str]) -> Server:
    """Start a gateway process with these settings and no others; its log goes to ``folder``."""
    port = free_port()
    own = {name: value for name, value in os.environ.items() if not name.startswith("KVGATE_")}
    return Server(
        [sys.executable, "-m", "gateway"],
        port,
        folder / f"{name}.log",
        user=None,
        stop=signal.SIGTERM,
        environment=own | {"PYTHONPATH": os.pathsep.join(sys.path)} | settings | {"KVGATE_PORT": str(port)},
    )


@contextmanager
def replicas(folder: Path, count: int, settings: Mapping[str, str]) -> Iterator[Replicas]:
    """Run them; ``settings`` are the gateways' environment, which has the store's folder and Redis already."""
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server())
        shared = {"KVGATE_STATE_DIR": str(folder), "KVGATE_REDIS_URL": f"redis://127.0.0.1:{redis.port}/0"}
        gateways = []
        for number in range(count):
            gateway = gateway_server(folder, f"gateway-{number}", {**shared, **settings})
            stack.callback(gateway.end)
            gateways.append(gateway)
        front = stack.enter_context(_nginx(folder, [each.port for each in gateways]))
        yield Replicas(f"http://127.0.0.1:{front.port}", front, gateways, redis)


@contextmanager
def _nginx(folder: Path, ports: list[int]) -> Iterator[Server]:
    program = nginx()
    if program is None:
        pytest.skip("nginx is not installed (Debian's package nginx-light)")
    said = CONFIG.read_text(encoding="utf-8")
    port = free_port()
    named = {f"127.0.0.1:{8001 + number}": f"127.0.0.1:{each}" for number, each in enumerate(ports)}
    for shipped, here in {"listen 127.0.0.1:8000;": f"listen 127.0.0.1:{port};", **named}.items():
        assert shipped in said
        said = said.replace(shipped, here)
    (folder / "kvgate.conf").write_text(said, encoding="utf-8")
    config = folder / "nginx.conf"
    config.write_text(_AROUND.format(folder=folder), encoding="utf-8")
    command = [program, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(config)]
    server = Server(command, port, folder / "nginx.log", user=None, stop=signal.SIGTERM)
    try:
        yield server
    finally:
        server.end()


def kill_nginx(server: Server) -> None:
    """SIGKILL its master and its workers: they would go on serving without it."""
    family = psutil.Process(server.process.pid).children(recursive=True)
    server.kill()
    for each in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(family, timeout=30)


def instances_setting(urls: Mapping[str, str]) -> str:
    """Return ``KVGATE_INSTANCES`` for these."""
    return json.dumps([{"id": name, "url": url} for name, url in urls.items()])


__all__ = ["Replicas", "gateway_server", "instances_setting", "kill_nginx", "replicas"]
