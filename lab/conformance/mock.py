"""A scripted backend: an OpenAI-like server that does what a request's own text tells it.

The script travels in the prompt, as ``<<{...}>>`` with the fields of ``Script``: gateways drop and rewrite headers and
unknown fields, but never what the user says.
"""

import asyncio
import contextlib
import gzip
import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from kvcontrol.core.errors import UNREADABLE
from lab.conformance.dialects import messages_events, responses_events
from lab.conformance.listening import Listening

MODEL = "mock-model"
_SCRIPT = re.compile(r"<<(\{.*?\})>>", re.DOTALL)
_BIG = 1 << 30
_CORS = {"access-control-allow-origin": "*"}
"""LMDeploy's and vLLM's servers let every web page read their answers."""


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """What one request is to experience; ``id`` is how the case finds it again."""

    id: str = ""
    status: int = 200
    shape: str = "lmdeploy"  # of an error: lmdeploy, openai, html
    message: str = ""  # of an error, instead of the usual one
    retry_after: str | None = None
    ttft_s: float = 0.0
    head_s: float = 0.0  # between a stream's head and its first event
    head_only: bool = False  # the connection is dropped behind a stream's head
    chunks: int = 3
    chunk_s: float = 0.0
    text: str = "tok"
    die_after: int | None = None
    hold_s: float = 0.0  # the connection stays open for so long behind a stream's [DONE]
    split: int | None = None
    end: str = "\n\n"
    lead: str = "data: "
    gzip: bool = False
    done: bool = True  # whether a stream has its [DONE]
    kind: str = "text/event-stream; charset=utf-8"  # content type of a stream
    stale: bool = False  # a connection that was used before has timed out: 408, and it ends
    aside: bool = False  # a background case's: it is not counted among the active ones, for which others wait

    def prompt(self) -> str:
        """The text that carries it. No two begin alike: gateways that route by beginnings would keep them together."""
        beginning = hashlib.sha256(self.id.encode()).hexdigest()
        return f"{beginning} <<{msgspec.json.encode(self).decode()}>>"


@dataclass(slots=True)
class Seen:
    """One request as it came in; ``aborted_s`` is when its client (the gateway) went away before the end."""

    path: str
    headers: list[tuple[str, str]]
    body: bytes
    script: Script
    at_s: float
    aborted_s: float | None = None
    finished: bool = False

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)


@dataclass(slots=True)
class MockBackend:
    """One backend on a fixed port. ``silent`` makes everything hang, health checks too."""

    name: str
    port: int
    silent: bool = False
    active: int = 0
    seen: list[Seen] = field(default_factory=list)
    _listening: Listening | None = None
    _used: set[object] = field(default_factory=set)
    """Connections that had a request."""

    async def start(self) -> None:
        """Listen; a second start after ``stop`` is a restart."""
        app = web.Application(client_max_size=_BIG)
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/responses"):
            app.router.add_post(path, self._reply)
        app.router.add_get("/v1/models", self._models)
        for path in ("/health", "/healthz", "/get_server_info", "/server_info", "/get_model_info", "/model_info"):
            app.router.add_get(path, self._health)
        app.router.add_route("*", "/{rest:.*}", self._unknown)
        self._listening = await Listening.start(app, self.port, shutdown_timeout_s=0.05)

    async def stop(self) -> None:
        """Close the port and all connections. Idempotent."""
        listening, self._listening = self._listening, None
        self._used.clear()
        if listening is not None:
            await listening.stop()

    def of(self, identity: str) -> list[Seen]:
        """Return the requests whose script has this id."""
        return [each for each in self.seen if each.script.id == identity]

    async def _health(self, request: web.Request) -> web.Response:
        del request
        await self._hang_if_silent()
        return web.json_response(
            {"status": "healthy", "model_path": MODEL, "model_id": MODEL, "served_model_name": MODEL}
        )

    async def _models(self, request: web.Request) -> web.Response:
        del request
        await self._hang_if_silent()
        card = {"id": MODEL, "object": "model", "created": 1, "owned_by": "mock", "max_model_len": 8192, "root": MODEL}
        return web.json_response({"object": "list", "data": [card]})

    async def _unknown(self, request: web.Request) -> web.Response:
        self.seen.append(Seen(request.path, _headers(request), await request.read(), Script(), time.monotonic()))
        return web.json_response({"detail": "Not Found"}, status=404)

    async def _hang_if_silent(self) -> None:
        if self.silent:
            await asyncio.sleep(3600)

    async def _reply(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        try:
            said = json.loads(body)
        except ValueError:
            said = {}
        seen = Seen(request.path, _headers(request), body, script_in(said), time.monotonic())
        self.seen.append(seen)
        self.active += not seen.script.aside
        try:
            await self._hang_if_silent()
            answer = await self._play(request, said, seen.script)
            seen.finished = True
        except (asyncio.CancelledError, ConnectionResetError, ConnectionAbortedError):
            seen.aborted_s = time.monotonic()
            raise
        finally:
            self.active -= not seen.script.aside
        return answer

    async def _play(self, request: web.Request, said: Mapping[str, Any], script: Script) -> web.StreamResponse:
        await asyncio.sleep(script.ttft_s)
        used_before = request.protocol in self._used
        self._used.add(request.protocol)
        if script.stale and used_before:
            return web.Response(status=web.HTTPRequestTimeout.status_code, headers={"connection": "close"})
        if script.status >= web.HTTPBadRequest.status_code:
            return _failure(script)
        if said.get("stream"):
            return await _stream(request, said, script)
        data = json.dumps(_whole(request.path, script), ensure_ascii=False).encode()
        if script.gzip:
            headers = {"content-encoding": "gzip", **_CORS}
            return web.Response(body=gzip.compress(data), headers=headers, content_type="application/json")
        return web.Response(body=data, content_type="application/json", headers=_CORS)


def script_in(said: Any) -> Script:
    """Return the script in a request's text; one without gets a plain answer."""
    text = json.dumps(said, ensure_ascii=False) if not isinstance(said, dict) else _text(said)
    match = _SCRIPT.search(text)
    if match is None:
        return Script()
    try:
        return msgspec.json.decode(match.group(1), type=Script)
    except UNREADABLE:
        return Script()


def _text(said: Mapping[str, Any]) -> str:
    prompt = said.get("prompt") or said.get("input")
    if prompt is not None:
        return prompt if isinstance(prompt, str) else "\n".join(str(each) for each in prompt)
    parts: list[str] = []
    for message in said.get("messages") or []:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            parts += [str(part.get("text", "")) for part in content if isinstance(part, dict)]
        else:
            parts.append(str(content))
    return "\n".join(parts)


def usage(script: Script) -> dict[str, Any]:
    """Return what a request is said to have cost."""
    return {"prompt_tokens": 7, "completion_tokens": script.chunks, "total_tokens": 7 + script.chunks}


def events(path: str, said: Mapping[str, Any], script: Script) -> list[bytes]:
    """Return the events of a stream, as they are sent."""
    if "messages" in path or "responses" in path:
        typed = messages_events if "messages" in path else responses_events
        return typed(MODEL, script.text, script.chunks, usage(script))
    chat = "chat" in path
    asked = bool((said.get("stream_options") or {}).get("include_usage"))
    texts: list[str] = []
    for number in range(script.chunks):
        word = f"{script.text}{number}"
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if number == script.chunks - 1 else None}
        choice |= {"delta": {"role": "assistant", "content": word}} if chat else {"text": word}
        texts.append(json.dumps(_chunk(chat=chat, choices=[choice]), ensure_ascii=False))
    if asked:
        texts.append(json.dumps(_chunk(chat=chat, choices=[]) | {"usage": usage(script)}))
    if script.done:
        texts.append("[DONE]")
    return [f"{script.lead}{text}{script.end}".encode() for text in texts]


def _chunk(*, chat: bool, choices: list[Any]) -> dict[str, Any]:
    kind = "chat.completion.chunk" if chat else "text_completion"
    return {"id": "c-1", "object": kind, "created": 1, "model": MODEL, "choices": choices}


async def _stream(request: web.Request, said: Mapping[str, Any], script: Script) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": script.kind, **_CORS})
    await response.prepare(request)
    await asyncio.sleep(script.head_s)
    for number, event in enumerate(events(request.path, said, script)):
        if script.die_after == number or script.head_only:
            _drop(request)
            return response
        size = script.split or len(event)
        for start in range(0, len(event), size):
            await response.write(event[start : start + size])
            if script.split:
                await asyncio.sleep(0.001)
        if script.chunk_s:
            await asyncio.sleep(script.chunk_s)
    await asyncio.sleep(script.hold_s)
    await response.write_eof()
    return response


def _whole(path: str, script: Script) -> dict[str, Any]:
    if "embeddings" in path:
        data = [{"object": "embedding", "index": 0, "embedding": [0.1, 0.2]}]
        return {"object": "list", "model": MODEL, "data": data, "usage": {"prompt_tokens": 3, "total_tokens": 3}}
    text = "".join(f"{script.text}{number}" for number in range(script.chunks))
    chat = "chat" in path
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
    choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    kind = "chat.completion" if chat else "text_completion"
    return {"id": "c-1", "object": kind, "created": 1, "model": MODEL, "choices": [choice], "usage": usage(script)}


def openai_error(status: int) -> bytes:
    """Return the body of an error in OpenAI's shape."""
    return json.dumps(
        {"error": {"message": f"scripted {status}", "type": "mock_error", "param": "x", "code": "mock_code"}}
    ).encode()


def _failure(script: Script) -> web.Response:
    headers = {} if script.retry_after is None else {"retry-after": script.retry_after}
    match script.shape:
        case "openai":
            body, kind = openai_error(script.status), "application/json"
        case "html":
            body, kind = b"<h1>no</h1>", "text/html"
        case _:
            message = script.message or f"scripted {script.status}"
            said = {"message": message, "type": "mock_error", "code": script.status}
            body, kind = json.dumps(said | {"param": None, "object": "error"}).encode(), "application/json"
    return web.Response(body=body, status=script.status, content_type=kind, headers=headers)


def _headers(request: web.Request) -> list[tuple[str, str]]:
    return [(name.decode("latin-1").lower(), value.decode("latin-1", "replace")) for name, value in request.raw_headers]


def _drop(request: web.Request) -> None:
    if request.transport is not None:
        with contextlib.suppress(OSError):
            request.transport.abort()
