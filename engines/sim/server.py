"""The HTTP surface of a simulated instance: LMDeploy's routes that generate, ``/kv/v1``, ``/metrics``."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Final, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from engines.control.routes import mount_control
from engines.requests.completions import prompts_of
from engines.requests.headers import HeaderMiddleware
from engines.requests.limits import RefusedError
from engines.requests.salt import SALT
from engines.requests.urgency import URGENCY
from engines.sim.answering import Answering, Job
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
from engines.sim.conversations import chat_of
from engines.sim.dialects import Dialect, Generate, OpenAi, Served
from engines.sim.endings import Answers, Drawn
from engines.sim.instance import ENGINE, SimInstance
from engines.sim.metrics import SimMetrics
from engines.sim.refused_request import RefusedRequestError, read_body
from engines.sim.text import SimTokenizer, TextError
from engines.sim.typed_dialects import Messages, Responses
from kvcontrol.core.errors import UNREADABLE

_INLINE_BYTES: Final = 16 << 10
"""Longer bodies are tokenized beside the event loop."""

_VERSION_HEADER: Final = "anthropic-version"

_Kind = TypeVar("_Kind", bound=Body)
_Result = TypeVar("_Result")
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
        shape = instance.spec.profile.engine
        self._answers = Answers(
            tokenizer,
            seed=instance.spec.seed,
            answer_tokens=answer_tokens,
            capacity_tokens=min(shape.context_tokens, shape.hbm_blocks * shape.block_tokens),
        )
        self._metrics = SimMetrics(instance)
        self._answering = Answering(instance, tokenizer, self._metrics)
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
        app.add_middleware(HeaderMiddleware, header=SALT)
        app.add_middleware(HeaderMiddleware, header=URGENCY)
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
        mount_control(app, instance.ask)
        return app

    def _route(self, kind: type[Generated], dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
        """Return what answers a route's requests."""

        async def handle(request: Request) -> Response:
            try:
                body = await read_body(request)
                return await self._answer(self._parsed(request, body, kind), len(body), dialect)
            except RefusedRequestError as refusal:
                return JSONResponse(dialect.refusal(refusal), status_code=refusal.status)

        return handle

    async def _count(self, request: Request) -> Response:
        try:
            body = await read_body(request)
            parsed = self._parsed(request, body, CountBody)
            tokens = await self._worked_out(self._prompt, parsed, len(body))
        except RefusedRequestError as refusal:
            return JSONResponse(_MESSAGES.refusal(refusal), status_code=refusal.status)
        return JSONResponse({"input_tokens": len(tokens)})

    def _parsed(self, request: Request, body: bytes, kind: type[_Kind]) -> _Kind:
        """Return what a body asks for; raises ``RefusedRequestError``."""
        spec = self._instance.spec
        if kind is not CountBody and spec.faults.refuse and self._instance.rng.random() < spec.faults.refuse:
            raise RefusedRequestError(HTTPStatus.SERVICE_UNAVAILABLE, "refused, as configured")
        try:
            parsed = msgspec.json.decode(body, type=kind, strict=False)
        except UNREADABLE as error:
            raise RefusedRequestError(HTTPStatus.BAD_REQUEST, f"invalid body: {error}") from error
        if isinstance(parsed, MessagesBody | CountBody) and not request.headers.get(_VERSION_HEADER):
            raise RefusedRequestError(HTTPStatus.BAD_REQUEST, f"Missing required header: {_VERSION_HEADER}")
        if parsed.model is not None and parsed.model != spec.model:
            message = f"The model {parsed.model!r} does not exist; there is {spec.model!r}."
            raise RefusedRequestError(
                HTTPStatus.NOT_FOUND, message, param="model" if isinstance(parsed, ResponsesBody) else None
            )
        try:
            parsed.check()
        except NotServedError as error:
            raise RefusedRequestError(HTTPStatus.BAD_REQUEST, str(error), param=error.param) from error
        return parsed

    async def _answer(self, parsed: Generated, length: int, dialect: Dialect) -> Response:
        jobs = self._jobs(parsed, await self._worked_out(self._drawn, parsed, length), dialect)
        if parsed.stream:
            together = isinstance(parsed, ChatBody)
            events = self._answering.streamed(jobs, dialect, together=together)
            return StreamingResponse(events, media_type="text/event-stream")
        encodable = dialect.whole(await self._answering.whole(jobs))
        return Response(msgspec.json.encode(encodable), media_type="application/json")

    def _jobs(self, parsed: Generated, drawn: Sequence[tuple[list[int], Drawn]], dialect: Dialect) -> list[Job]:
        """Return what is to be made for each prompt and its answer."""
        instance, salt, urgency = self._instance, SALT.current, URGENCY.current
        self._number += 1
        name = f"{dialect.prefix}{instance.epoch[:8]}-{self._number}"
        created = int(time.time())
        jobs = []
        for index, (prompt, answer) in enumerate(drawn):
            served = Served(
                name=name,
                request=parsed,
                model=instance.spec.model,
                prompt_tokens=len(prompt),
                words=answer.words,
                reason=answer.reason,
                created=created,
                index=index,
                last=answer.last,
                last_text="".join(map(self._tokenizer.shown, answer.last)),
            )
            own_name = f"{name}.{index}" if index else name
            request = instance.request(own_name, prompt, answer.generated, salt=salt, urgency=urgency)
            jobs.append(Job(served, request))
        return jobs

    async def _worked_out(self, work: Callable[[_Kind], _Result], parsed: _Kind, length: int) -> _Result:
        """Return ``work(parsed)``, done beside the event loop for a long body; raises ``RefusedRequestError``."""
        try:
            return work(parsed) if length <= _INLINE_BYTES else await asyncio.to_thread(work, parsed)
        except RefusedError as error:
            raise RefusedRequestError(HTTPStatus.BAD_REQUEST, str(error)) from error
        except (TextError, RecursionError) as error:
            param = "input" if isinstance(parsed, ResponsesBody) else None
            raise RefusedRequestError(HTTPStatus.BAD_REQUEST, str(error), param=param) from error

    def _drawn(self, parsed: Generated) -> list[tuple[list[int], Drawn]]:
        """Return the prompts, each as often as it is to be answered, with their answers."""
        draw, ending = self._answers.draw, parsed.ending
        if isinstance(parsed, CompletionBody):
            prompts = [self._encoded(each) for each in prompts_of(parsed.prompt)]
            each = range(parsed.n or 1)
            return [(prompt, draw(prompt, ending, choice=choice)) for prompt in prompts for choice in each]
        prompt = self._prompt(parsed)
        choices = parsed.choices if isinstance(parsed, ChatBody) else 1
        return [(prompt, draw(prompt, ending, choice=choice)) for choice in range(choices)]

    def _prompt(self, parsed: ChatBody | GenerateBody | MessagesBody | CountBody | ResponsesBody) -> list[int]:
        prompt: Any
        match parsed:
            case GenerateBody():
                prompt = parsed.input_ids or parsed.prompt or ""
            case MessagesBody(input_ids=list(tokens)):
                prompt = tokens
            case _:
                return self._tokenizer.chat(*chat_of(parsed, merge=not self._tokenizer.has_inline_system))
        return self._encoded(prompt)

    def _encoded(self, prompt: str | list[int]) -> list[int]:
        return self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
