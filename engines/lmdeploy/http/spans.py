"""An instance's part of a request's trace: below the span that its caller sent, one for the time it has the request.

    POST /v1/chat/completions      from the request's head to the last byte of the answer
      prepare                      template and tokens, and the way to the engine process
      queue                        in the engine, until it was first scheduled
      prefill                      until its first token
      decode                       from there to its last one

The inner four are read off what LMDeploy's engine process says with its tokens; a request that generates several
answers has them for each. Prompts and answers are in none of it. Imported only where traces are made.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextvars import ContextVar
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.util.types import AttributeValue

from engines.lmdeploy.http.concurrency_limit import INFERENCE
from kvcontrol.tracing.outlet import Tracing

_CONTEXT: Final = frozenset({b"traceparent", b"tracestate"})
_SERVER_ERROR: Final = 500
_NS: Final = 1e9

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]


class _Generation:
    """What became known of one answer; times are seconds since 1970, 0 before they are known."""

    __slots__ = ("cached", "first_s", "last_s", "prompt", "queued_s", "scheduled_s", "stats", "tokens")

    def __init__(self, stats: Any) -> None:
        self.stats = stats  # LMDeploy's own, by whose identity the answers of a request are told apart
        self.queued_s = self.scheduled_s = self.first_s = self.last_s = 0.0
        self.prompt = int(stats.prompt_tokens)
        self.tokens = self.cached = 0

    def note(self, outputs: Any) -> None:
        """Take in some tokens; ``outputs`` is an ``EngineOutput``."""
        self.tokens += len(outputs.token_ids)
        metrics = outputs.req_metrics
        if metrics is None:  # it was aborted
            return
        if not self.first_s:
            self.first_s = float(metrics.token_timestamp)
            self.cached = int(metrics.cached_tokens)
            for event in metrics.engine_events:
                if event.type.name == "QUEUED":
                    self.queued_s = self.queued_s or float(event.timestamp)
                elif event.type.name == "SCHEDULED":
                    self.scheduled_s = self.scheduled_s or float(event.timestamp)
        self.last_s = float(metrics.token_timestamp)


class _Request:
    """The answers of one request."""

    def __init__(self) -> None:
        self.generations: list[_Generation] = []

    def note(self, outputs: Any, stats: Any) -> None:
        for each in self.generations:
            if each.stats is stats:
                each.note(outputs)
                return
        generation = _Generation(stats)
        self.generations.append(generation)
        generation.note(outputs)


_CURRENT: ContextVar[_Request | None] = ContextVar("kvgate_spans", default=None)


class SpanMiddleware:
    """Pure ASGI: a span for each inference request."""

    def __init__(self, app: _App, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http" or scope["path"] not in INFERENCE:
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        begun_ns = time.time_ns()
        span = self._tracing.tracer.start_span(
            f"POST {path}",
            self._tracing.context_of(_carrier(scope["headers"])),
            SpanKind.SERVER,
            {"http.request.method": scope["method"], "http.route": path, "url.path": path},
            start_time=begun_ns,
        )
        status = 0

        async def sent(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        request = _Request()
        token = _CURRENT.set(request)
        try:
            await self._app(scope, receive, sent)
        except BaseException as error:
            _failed(span, type(error).__name__)
            raise
        finally:
            _CURRENT.reset(token)
            if status:
                span.set_attribute("http.response.status_code", status)
            if status >= _SERVER_ERROR:
                _failed(span, str(status))
            _end(self._tracing.tracer, span, begun_ns, request)


def _carrier(headers: list[tuple[bytes, bytes]]) -> Mapping[str, str]:
    return {name.decode(): value.decode("latin-1") for name, value in headers if name in _CONTEXT}


def _failed(span: Span, kind: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, kind))


def _end(tracer: Tracer, span: Span, begun_ns: int, request: _Request) -> None:
    context = set_span_in_context(span, Context())
    for each in request.generations:
        _phases(tracer, context, begun_ns, each)
    if request.generations:
        span.set_attribute("kvgate.prompt_tokens", sum(each.prompt for each in request.generations))
        span.set_attribute("kvgate.cached_tokens", sum(each.cached for each in request.generations))
        span.set_attribute("kvgate.completion_tokens", sum(each.tokens for each in request.generations))
    span.end()


def _phases(tracer: Tracer, context: Context, begun_ns: int, generation: _Generation) -> None:
    """Each phase whose beginning and end are known; the clock of the engine process may be a moment off."""
    marks = [
        begun_ns / _NS,
        *(generation.queued_s, generation.scheduled_s, generation.first_s, generation.last_s),
    ]
    counts: dict[str, dict[str, AttributeValue]] = {
        "prefill": {"kvgate.tokens": generation.prompt - generation.cached},
        "decode": {"kvgate.tokens": generation.tokens},
    }
    for name, begun_s, ended_s in zip(("prepare", "queue", "prefill", "decode"), marks, marks[1:], strict=False):
        if begun_s and ended_s:
            part = tracer.start_span(
                name, context, attributes=counts.get(name), start_time=begun_ns if name == "prepare" else _ns(begun_s)
            )
            part.end(max(_ns(begun_s), _ns(ended_s)))


def _ns(seconds: float) -> int:
    return round(seconds * _NS)


# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def queue_update(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """``queue_update`` of the one ``MetricsProcessor``, in the api_server: each answer's tokens pass there, with their
    times, in the task that answers the request.
    """

    def queue_update(update_data: Any) -> None:
        request = _CURRENT.get()
        if request is not None:
            request.note(update_data[0], update_data[1])
        original(update_data)

    return queue_update
