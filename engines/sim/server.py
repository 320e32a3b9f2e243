"""The HTTP surface of a simulated instance: OpenAI's chat and completions, ``/kv/v1``, ``/metrics``."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from engines.lmdeploy.rider import RiderMiddleware
from engines.lmdeploy.tenancy import SALT
from engines.lmdeploy.urgency import URGENCY
from engines.sim.bodies import ChatBody, CompletionBody, Dialect, Usage
from engines.sim.control_routes import RefusedRequestError, mount_control, read_body
from engines.sim.driver import Answer
from engines.sim.engine import DoesNotFitError
from engines.sim.faults import InjectedFaultError
from engines.sim.instance import ENGINE, SimInstance
from engines.sim.metrics import SimMetrics
from engines.sim.text import SimTokenizer, TextError
from kvcontrol.core.errors import UNREADABLE

_INLINE_BYTES: Final = 16 << 10
"""Longer bodies are tokenized beside the event loop."""

_Kind = TypeVar("_Kind", ChatBody, CompletionBody)
_CHAT: Final = Dialect(chat=True)
_COMPLETION: Final = Dialect(chat=False)


class Server:
    """Answers for one instance. ``answer_tokens`` is an answer's length where the client says none."""

    def __init__(self, instance: SimInstance, tokenizer: SimTokenizer, *, answer_tokens: int) -> None:
        self._instance = instance
        self._tokenizer = tokenizer
        self._answer_tokens = answer_tokens
        self._metrics = SimMetrics(instance)
        self._number = 0
        self._ready = False

    def app(self) -> FastAPI:
        """Return the application; the instance lives as long as it serves."""

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            self._instance.start()
            self._ready = True
            try:
                yield
            finally:
                self._ready = False
                self._instance.close()

        app = FastAPI(title="kvgate simulated engine", lifespan=lifespan)
        app.add_middleware(RiderMiddleware, rider=SALT)
        app.add_middleware(RiderMiddleware, rider=URGENCY)
        instance = self._instance

        async def health() -> Response:
            return Response(status_code=HTTPStatus.OK if self._ready else HTTPStatus.SERVICE_UNAVAILABLE)

        async def models() -> dict[str, Any]:
            card = {"id": instance.spec.model, "object": "model", "created": 0, "owned_by": ENGINE}
            return {"object": "list", "data": [card]}

        async def metrics() -> Response:
            return Response(self._metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

        async def chat(request: Request) -> Response:
            return await self._generate(request, ChatBody, _CHAT)

        async def completions(request: Request) -> Response:
            return await self._generate(request, CompletionBody, _COMPLETION)

        for path, method, handler in (
            ("/health", "GET", health),
            ("/v1/models", "GET", models),
            ("/metrics", "GET", metrics),
            ("/v1/chat/completions", "POST", chat),
            ("/v1/completions", "POST", completions),
        ):
            app.add_api_route(path, handler, methods=[method], response_model=None)
        mount_control(app, instance)
        return app

    async def _generate(self, request: Request, kind: type[_Kind], dialect: Dialect) -> Response:
        try:
            body = await read_body(request)
            return await self._answer(self._asked(body, kind), body, dialect)
        except RefusedRequestError as refusal:
            return refusal.answer()

    def _asked(self, body: bytes, kind: type[_Kind]) -> _Kind:
        """Return what a body asks for; raises ``RefusedRequestError``."""
        spec = self._instance.spec
        if spec.faults.refuse and self._instance.rng.random() < spec.faults.refuse:
            raise RefusedRequestError(HTTPStatus.SERVICE_UNAVAILABLE, "refused, as was asked for", "overloaded")
        try:
            asked = msgspec.json.decode(body, type=kind)
        except UNREADABLE as error:
            raise RefusedRequestError(HTTPStatus.BAD_REQUEST, f"the body is not what is allowed: {error}") from error
        if asked.model != spec.model:
            raise RefusedRequestError(
                HTTPStatus.NOT_FOUND, f"there is no model {asked.model!r}; there is {spec.model!r}"
            )
        return asked

    async def _answer(self, asked: ChatBody | CompletionBody, body: bytes, dialect: Dialect) -> Response:
        instance, salt = self._instance, SALT.current
        try:
            if len(body) <= _INLINE_BYTES:
                prompt = self._tokens(asked)
            else:
                prompt = await asyncio.to_thread(self._tokens, asked)
            most = asked.most_tokens or self._answer_tokens
            instance.engine.check(len(prompt), most)
        except (TextError, DoesNotFitError, OverflowError) as error:
            raise RefusedRequestError(HTTPStatus.BAD_REQUEST, str(error)) from error
        self._number += 1
        name = f"{dialect.prefix}-{instance.epoch[:8]}-{self._number}"
        words = self._tokenizer.answer(f"{instance.spec.seed} {hash(tuple(prompt))}", most)
        served = _Served(
            name=name,
            dialect=dialect,
            asked=asked,
            prompt_tokens=len(prompt),
            words=words,
            reason="stop" if asked.most_tokens is None else "length",
            created=int(time.time()),
        )
        try:
            request = instance.request(name, prompt, words, salt=salt, urgency=URGENCY.current)
        except OverflowError as error:
            raise RefusedRequestError(HTTPStatus.BAD_REQUEST, f"a token can't be: {error}") from error
        if asked.stream:
            return StreamingResponse(self._stream(request, served), media_type="text/event-stream")
        async with instance.driver.answering(request) as answer:
            async for _ in self._paced(answer):
                pass
            usage = served.usage(answer, len(words))
        text = self._tokenizer.decode(words)
        said = served.head(dialect.whole) | {
            "choices": [dialect.choice(text, served.reason, chunk=False)],
            "usage": usage.said(),
        }
        return Response(msgspec.json.encode(said), media_type="application/json")

    def _tokens(self, asked: ChatBody | CompletionBody) -> list[int]:
        if isinstance(asked, ChatBody):
            kwargs = dict(asked.chat_template_kwargs or {})
            if asked.enable_thinking is not None:
                kwargs.setdefault("enable_thinking", asked.enable_thinking)
            functions = [each.get("function") for each in asked.tools or ()]
            kwargs["tools"] = [_function(each) for each in functions if isinstance(each, dict)] or None
            return self._tokenizer.chat(asked.messages, kwargs)
        if isinstance(asked.prompt, str):
            return self._tokenizer.encode(asked.prompt)
        return asked.prompt

    async def _stream(self, request: Any, served: "_Served") -> AsyncIterator[bytes]:
        instance, dialect = self._instance, served.dialect
        faults, words = instance.spec.faults, served.words
        dies_at = -1
        if faults.die and instance.rng.random() < faults.die:
            dies_at = instance.rng.randrange(len(words))
        done = 0
        async with instance.driver.answering(request) as answer:
            async for count in self._paced(answer):
                text = self._tokenizer.decode(words[done : done + count])
                first, done = not done, done + count
                if 0 <= dies_at < done:
                    raise InjectedFaultError("the answer breaks off here, as was asked for")
                reason = served.reason if done >= len(words) else None
                yield served.event([dialect.choice(text, reason, chunk=True, first=first)])
            if served.asked.usage_in_stream:
                yield served.event([], served.usage(answer, done))
        yield b"data: [DONE]\n\n"

    async def _paced(self, answer: Answer) -> AsyncIterator[int]:
        """The answer's tokens as they come, for the metrics too."""
        began_s = last_s = time.monotonic()
        first = True
        async for count in answer:
            now_s = time.monotonic()
            if first:
                self._metrics.first_token(now_s - began_s)
            else:
                self._metrics.gap(now_s - last_s)
            first, last_s = False, now_s
            yield count


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    """One request's constants."""

    name: str
    dialect: Dialect
    asked: ChatBody | CompletionBody
    prompt_tokens: int
    words: list[int]
    reason: str
    created: int

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.name, "object": kind, "created": self.created, "model": self.asked.model}

    def usage(self, answer: Answer, tokens: int) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=tokens,
            cached_tokens=answer.sequence.cached_tokens,
        )

    def event(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> bytes:
        said = self.head(self.dialect.chunk) | {"choices": choices}
        if usage is not None:
            said["usage"] = usage.said()
        return b"data: " + msgspec.json.encode(said) + b"\n\n"


def _function(function: dict[str, Any]) -> dict[str, Any]:
    """A tool as LMDeploy passes it to the template."""
    return {name: function.get(name) for name in ("description", "name", "parameters")}


__all__ = ["Server"]
