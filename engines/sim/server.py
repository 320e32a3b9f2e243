"""The HTTP surface of a simulated instance: LMDeploy's routes that generate, ``/kv/v1``, ``/metrics``."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Final, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from engines.lmdeploy.rider import RiderMiddleware
from engines.lmdeploy.tenancy import SALT
from engines.lmdeploy.urgency import URGENCY
from engines.sim.bodies import (
    Body,
    ChatBody,
    CompletionBody,
    CountBody,
    GenerateBody,
    Generated,
    MessagesBody,
    NotServedError,
    ResponsesBody,
)
from engines.sim.control_routes import RefusedRequestError, mount_control, read_body
from engines.sim.conversations import chat_of
from engines.sim.dialects import Dialect, Generate, OpenAi, Served
from engines.sim.driver import Answer
from engines.sim.engine import DoesNotFitError
from engines.sim.faults import InjectedFaultError
from engines.sim.instance import ENGINE, SimInstance
from engines.sim.metrics import SimMetrics
from engines.sim.sequence import SimRequest
from engines.sim.text import SimTokenizer, TextError
from engines.sim.typed_dialects import Messages, Responses
from kvcontrol.core.errors import UNREADABLE

_INLINE_BYTES: Final = 16 << 10
"""Longer bodies are tokenized beside the event loop."""

_VERSION_HEADER: Final = "anthropic-version"

_Kind = TypeVar("_Kind", bound=Body)
_CHAT: Final = OpenAi(chat=True)
_COMPLETION: Final = OpenAi(chat=False)
_GENERATE: Final = Generate()
_MESSAGES: Final = Messages()
_RESPONSES: Final = Responses()


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

        for path, method, handler in (
            ("/health", "GET", health),
            ("/v1/models", "GET", models),
            ("/metrics", "GET", metrics),
            ("/v1/chat/completions", "POST", self._route(ChatBody, _CHAT)),
            ("/v1/completions", "POST", self._route(CompletionBody, _COMPLETION)),
            ("/v1/messages", "POST", self._route(MessagesBody, _MESSAGES)),
            ("/v1/messages/count_tokens", "POST", self._count),
            ("/v1/responses", "POST", self._route(ResponsesBody, _RESPONSES)),
            ("/generate", "POST", self._route(GenerateBody, _GENERATE)),
        ):
            app.add_api_route(path, handler, methods=[method], response_model=None)
        mount_control(app, instance)
        return app

    def _route(self, kind: type[Generated], dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
        """Return what answers a route's requests."""

        async def handle(request: Request) -> Response:
            try:
                body = await read_body(request)
                return await self._answer(self._asked(request, body, kind), len(body), dialect)
            except RefusedRequestError as refusal:
                return JSONResponse(dialect.refusal(refusal), status_code=refusal.status)

        return handle

    async def _count(self, request: Request) -> Response:
        try:
            body = await read_body(request)
            asked = self._asked(request, body, CountBody)
            tokens = await self._tokens(asked, len(body))
        except RefusedRequestError as refusal:
            return JSONResponse(_MESSAGES.refusal(refusal), status_code=refusal.status)
        return JSONResponse({"input_tokens": len(tokens)})

    def _asked(self, request: Request, body: bytes, kind: type[_Kind]) -> _Kind:
        """Return what a body asks for; raises ``RefusedRequestError``."""
        spec = self._instance.spec
        if kind is not CountBody and spec.faults.refuse and self._instance.rng.random() < spec.faults.refuse:
            raise RefusedRequestError(HTTPStatus.SERVICE_UNAVAILABLE, "refused, as was asked for")
        try:
            asked = msgspec.json.decode(body, type=kind)
        except UNREADABLE as error:
            raise RefusedRequestError(HTTPStatus.BAD_REQUEST, f"the body is not what is allowed: {error}") from error
        if isinstance(asked, MessagesBody | CountBody) and not request.headers.get(_VERSION_HEADER):
            raise RefusedRequestError(HTTPStatus.BAD_REQUEST, f"Missing required header: {_VERSION_HEADER}")
        if asked.model is not None and asked.model != spec.model:
            message = f"The model {asked.model!r} does not exist; there is {spec.model!r}."
            raise RefusedRequestError(
                HTTPStatus.NOT_FOUND, message, param="model" if isinstance(asked, ResponsesBody) else None
            )
        try:
            asked.check()
        except NotServedError as error:
            raise RefusedRequestError(HTTPStatus.BAD_REQUEST, str(error), param=error.param) from error
        return asked

    async def _answer(self, asked: Generated, length: int, dialect: Dialect) -> Response:
        instance, salt = self._instance, SALT.current
        prompt = await self._tokens(asked, length)
        most = asked.most_tokens or self._answer_tokens
        try:
            instance.engine.check(len(prompt), most)
        except (DoesNotFitError, OverflowError) as error:
            raise RefusedRequestError(HTTPStatus.BAD_REQUEST, str(error)) from error
        self._number += 1
        name = f"{dialect.prefix}{instance.epoch[:8]}-{self._number}"
        words = self._tokenizer.answer(f"{instance.spec.seed} {hash(tuple(prompt))}", most)
        served = Served(
            name=name,
            asked=asked,
            model=instance.spec.model,
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
            return StreamingResponse(self._stream(request, served, dialect), media_type="text/event-stream")
        async with instance.driver.answering(request) as answer:
            async for _ in self._paced(answer):
                pass
            cached = answer.sequence.cached_tokens
        said = dialect.whole(served, self._tokenizer.decode(words), cached)
        return Response(msgspec.json.encode(said), media_type="application/json")

    async def _tokens(self, asked: Body, length: int) -> list[int]:
        """Return the prompt's tokens; raises ``RefusedRequestError``."""
        try:
            if length <= _INLINE_BYTES:
                return self._read(asked)
            return await asyncio.to_thread(self._read, asked)
        except (TextError, RecursionError) as error:
            param = "input" if isinstance(asked, ResponsesBody) else None
            raise RefusedRequestError(HTTPStatus.BAD_REQUEST, str(error), param=param) from error

    def _read(self, asked: Body) -> list[int]:
        prompt: str | list[int]
        match asked:
            case CompletionBody():
                prompt = asked.prompt
            case GenerateBody():
                prompt = asked.input_ids or asked.prompt or ""
            case MessagesBody(input_ids=list(tokens)):
                prompt = tokens
            case _:
                return self._tokenizer.chat(*chat_of(asked, merge=not self._tokenizer.has_inline_system))
        return self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    async def _stream(self, request: SimRequest, served: Served, dialect: Dialect) -> AsyncIterator[bytes]:
        instance, words = self._instance, served.words
        stream, faults = dialect.stream(served), instance.spec.faults
        dies_at = -1
        if faults.die and instance.rng.random() < faults.die:
            dies_at = instance.rng.randrange(len(words))
        if begin := stream.begin():
            yield begin
        done = 0
        async with instance.driver.answering(request) as answer:
            async for count in self._paced(answer):
                tokens = words[done : done + count]
                text = self._tokenizer.decode(tokens)
                done += count
                if 0 <= dies_at < done:
                    raise InjectedFaultError("the answer breaks off here, as was asked for")
                yield stream.more(text, done, tokens)
            cached = answer.sequence.cached_tokens
        yield stream.end(cached)

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


__all__ = ["Server"]
