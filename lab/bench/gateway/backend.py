"""Backends that cost next to nothing: nginx with a fixed answer, and a server that paces a stream.

``python -m lab.bench.gateway.backend PORT CHUNKS PERIOD_S`` is the second one; it also answers whole, for where
there is no nginx.
"""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

MODEL = "bench-model"
_ANSWER = json.dumps(
    {
        "id": "c-1",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "on-PORT"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10},
    },
    separators=(",", ":"),
)
"""What each backend says, with its own port: where a request went stands in its answer, which no gateway rewrites."""

_MODELS = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "bench"}]})
_INFO = json.dumps({"status": "healthy", "model_path": MODEL, "model_id": MODEL, "served_model_name": MODEL})
_CHUNK = json.dumps(
    {
        "id": "chatcmpl-0123456789",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": MODEL,
        "choices": [{"index": 0, "delta": {"content": " token"}, "finish_reason": None}],
    },
    separators=(",", ":"),
).encode()
_EVENT = b"data: " + _CHUNK + b"\n\n"
_INFOS = ("/health", "/get_server_info", "/server_info", "/get_model_info", "/model_info")
_GETS = frozenset({"/v1/models", *_INFOS})
_STOP_S = 10.0


def nginx() -> str | None:
    """Return nginx' path, None where it isn't installed."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


@contextmanager
def whole_backend(folder: Path, ports: tuple[int, ...]) -> Iterator[str]:
    """Answer on these ports while the block runs; yields what answers."""
    found = nginx()
    if found is None:
        with paced_backend(ports, chunks=1, period_s=0.0):
            yield "kvgate's own scripted server"
        return
    for name in ("body", "logs"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    config = folder / "nginx.conf"
    config.write_text(_nginx_config(folder, ports), encoding="utf-8")
    process = subprocess.Popen([found, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(config)])
    try:
        yield "nginx"
    finally:
        _end(process)


@contextmanager
def paced_backend(ports: tuple[int, ...], *, chunks: int, period_s: float) -> Iterator[None]:
    """Stream ``chunks`` pieces a request, one each ``period_s``, while the block runs."""
    own = [sys.executable, "-m", "lab.bench.gateway.backend"]
    processes = [subprocess.Popen([*own, str(port), str(chunks), str(period_s)]) for port in ports]
    try:
        yield
    finally:
        for process in processes:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _nginx_config(folder: Path, ports: tuple[int, ...]) -> str:
    listens = "\n".join(f"    listen 127.0.0.1:{port} backlog=4096;" for port in ports)
    info = "\n".join(f"    location = {path} {{ return 200 '{_INFO}'; }}" for path in _INFOS)
    return f"""
daemon off;
pid {folder}/nginx.pid;
worker_processes 1;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  client_max_body_size 64m;
  client_body_buffer_size 1m;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/logs;
  fastcgi_temp_path {folder}/logs;
  uwsgi_temp_path {folder}/logs;
  scgi_temp_path {folder}/logs;
  keepalive_requests 100000000;
  keepalive_timeout 600s;
  default_type application/json;
  server {{
{listens}
    location = /v1/models {{ return 200 '{_MODELS}'; }}
{info}
    location /v1/ {{ return 200 '{_ANSWER.replace("PORT", "$server_port")}'; }}
    location / {{ return 404 '{{}}'; }}
  }}
}}
"""


class _Paced(asyncio.Protocol):
    """One connection of the paced server: HTTP/1.1 with bodies of known length, which is all that gateways send."""

    def __init__(self, port: int, chunks: int, period_s: float) -> None:
        self._said = _ANSWER.replace("PORT", str(port))
        self._chunks = chunks
        self._period_s = period_s
        self._data = b""
        self._left = 0
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if self._timer is not None:
            self._timer.cancel()
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, rest = self._data.partition(b"\r\n\r\n")
        if not found:
            return
        if b"transfer-encoding: chunked" in head.lower():
            if not rest.endswith(b"0\r\n\r\n"):
                return
            length = len(rest)
        else:
            length = next(
                (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
            )
        if len(rest) < length:
            return
        self._data = rest[length:]
        self._answer(head, rest[:length])

    def _answer(self, head: bytes, body: bytes) -> None:
        line = head.split(b"\r\n", 1)[0]
        if self._transport is None:
            return
        if line.startswith(b"GET"):
            path = line.split(b" ")[1].decode("latin-1")
            self._whole(_MODELS if path == "/v1/models" else _INFO, "200 OK" if path in _GETS else "404 Not Found")
        elif b'"stream":true' in body or b'"stream": true' in body:
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
            self._left = self._chunks
            self._next()
        else:
            self._whole(self._said)

    def _whole(self, text: str, status: str = "200 OK") -> None:
        if self._transport is not None:
            head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
            self._transport.write((head + text).encode())

    def _next(self) -> None:
        if self._transport is None:
            return
        if not self._left:
            self._transport.write(_chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            return
        self._left -= 1
        self._transport.write(_chunked(_EVENT))
        self._timer = asyncio.get_running_loop().call_later(self._period_s, self._next)


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def _serve(port: int, chunks: int, period_s: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Paced(port, chunks, period_s), "127.0.0.1", port, backlog=4096)
    async with server:
        await server.serve_forever()


def main(arguments: list[str]) -> None:
    """Serve until a stop signal."""
    import uvloop

    port, chunks, period_s = arguments
    uvloop.run(_serve(int(port), int(chunks), float(period_s)))


if __name__ == "__main__":
    main(sys.argv[1:])
