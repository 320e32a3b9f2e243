"""What a case works with: the target's address, the two mock backends behind it, and ways to ask."""

import asyncio
import contextlib
import io
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from lab.conformance.mock import MODEL, MockBackend, Script, Seen

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
_ANSWER_S = 60.0
_PROBES = 4


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer; ``seconds`` is how long it took."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float

    @property
    def kind(self) -> str:
        """The media type without its parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    def json(self) -> Any:
        """Return the body as JSON, or None when it isn't."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    def error(self) -> Mapping[str, Any]:
        """Return the ``error`` object of OpenAI's envelope, empty when there is none."""
        said = self.json()
        error = said.get("error") if isinstance(said, dict) else None
        return error if isinstance(error, dict) else {}

    def events(self) -> list[str]:
        """Return the data of each event of a stream."""
        text = self.body.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
        return [
            "\n".join(line[5:].removeprefix(" ") for line in event.split("\n") if line.startswith("data:"))
            for event in text.split("\n\n")
            if "data:" in event
        ]

    def shown(self) -> str:
        """Return status and the beginning of the body, for a report."""
        return f"{self.status} {self.body[:120].decode('utf-8', 'replace')!r}"


class Rig:
    """One target and its backends; ``key`` is sent with every request."""

    def __init__(self, target: str, backends: tuple[MockBackend, MockBackend], session: aiohttp.ClientSession) -> None:
        self.target = target.rstrip("/")
        self.backends = backends
        self.session = session
        self.key = "sk-conformance"
        self.pid: int | None = None
        """The target's process, where that is known."""
        parts = urlsplit(self.target)
        self.host = parts.hostname or "127.0.0.1"
        self.port = parts.port or 80
        self._numbers = itertools.count(1)

    def script(self, **fields: Any) -> Script:
        """Return a script with an id of its own."""
        return Script(id=f"case-{next(self._numbers)}", **fields)

    def seen(self, script: Script) -> list[Seen]:
        """Return what both backends saw of a script's request, in order."""
        return sorted((each for backend in self.backends for each in backend.of(script.id)), key=lambda each: each.at_s)

    def served_by(self, script: Script) -> str:
        """Return the backend that saw a script's request last, "" when none did."""
        found = [(each.at_s, backend.name) for backend in self.backends for each in backend.of(script.id)]
        return max(found)[1] if found else ""

    @property
    def active(self) -> int:
        return sum(backend.active for backend in self.backends)

    def headers(self, **more: str) -> dict[str, str]:
        named = {name.replace("_", "-"): value for name, value in more.items()}
        return {"authorization": f"Bearer {self.key}", "content-type": "application/json"} | named

    async def ask(self, script: Script, path: str = CHAT, *, extra: Mapping[str, Any] | None = None) -> Answer:
        """Send a plain request that carries a script; ``extra`` are more fields of its body."""
        return await self.post(path, json.dumps(body_of(script, path, extra)).encode())

    async def post(
        self, path: str, data: bytes, headers: Mapping[str, str] | None = None, *, limit_s: float = _ANSWER_S
    ) -> Answer:
        """Send bytes as a body and read the whole answer."""
        began_s = time.monotonic()
        async with (
            asyncio.timeout(limit_s),
            self.session.post(
                self.target + path, data=io.BytesIO(data), headers=headers or self.headers(), allow_redirects=False
            ) as answer,
        ):
            body = await answer.read()
            return Answer(answer.status, _lower(answer.headers), body, time.monotonic() - began_s)

    async def get(self, path: str) -> Answer:
        began_s = time.monotonic()
        async with (
            asyncio.timeout(_ANSWER_S),
            self.session.get(self.target + path, headers=self.headers(), allow_redirects=False) as answer,
        ):
            body = await answer.read()
            return Answer(answer.status, _lower(answer.headers), body, time.monotonic() - began_s)

    @asynccontextmanager
    async def streaming(self, script: Script) -> AsyncIterator[aiohttp.ClientResponse]:
        """Open a streamed answer; leaving the block closes the connection."""
        body = json.dumps(body_of(script, CHAT, {"stream": True})).encode()
        async with asyncio.timeout(_ANSWER_S):
            answer = await self.session.post(self.target + CHAT, data=io.BytesIO(body), headers=self.headers())
        try:
            yield answer
        finally:
            answer.close()

    async def raw(self, data: bytes, *, limit_s: float = 5.0) -> bytes:
        """Send bytes over a connection of their own and return what comes until it closes, or nothing more comes."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        got = b""
        try:
            writer.write(data)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            with contextlib.suppress(TimeoutError, ConnectionError):
                while True:
                    async with asyncio.timeout(limit_s):
                        piece = await reader.read(1 << 16)
                    if not piece:
                        break
                    got += piece
                    limit_s = min(limit_s, 1.0)
        finally:
            writer.close()
        return got

    async def until(self, condition: Callable[[], object], limit_s: float) -> bool:
        """Wait until a condition holds; False when it doesn't in time."""
        ends_s = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > ends_s:
                return False
            await asyncio.sleep(0.02)
        return True

    async def both_used(self, limit_s: float) -> float | None:
        """Send a few requests at a time until both backends have got one from now on; return the seconds it took, None
        if too long. A gateway may send single ones to the same backend, as long as the other one has work.
        """
        before = [len(backend.seen) for backend in self.backends]
        began_s = time.monotonic()
        while time.monotonic() - began_s < limit_s:
            await asyncio.gather(*(self._probe() for _ in range(_PROBES)))
            if all(len(backend.seen) > count for backend, count in zip(self.backends, before, strict=True)):
                return time.monotonic() - began_s
            await asyncio.sleep(0.05)
        return None

    async def _probe(self) -> None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            await self.ask(self.script(text="probe"))


def body_of(script: Script, path: str, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a request's body that carries a script."""
    body: dict[str, Any] = {"model": MODEL}
    if "chat" in path or "messages" in path:
        body["messages"] = [{"role": "user", "content": script.prompt()}]
        if "messages" in path:
            body["max_tokens"] = 64
    else:
        body["prompt" if "completions" in path else "input"] = script.prompt()
    return body | dict(extra or {})


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}
