"""One trace for each request: its steps here, every attempt at an instance, and below that the instance's own spans.

    POST /v1/chat/completions          the request, until the last byte of its answer
      receive, parse, fingerprint, admission    the steps before it is sent, as they are timed for the metrics
      plan                             matching and routing, once for each attempt
      chat MODEL                       an attempt, with OpenTelemetry's attributes of generative AI
        prefill elsewhere              while another instance computes its prompt
        (the instance's spans, where it makes some)

A caller's ``traceparent`` is the parent of the first, an attempt's is sent to its instance. Names of models that nobody
serves, prompts and answers are in none of it. What a span says is read off the request's record once it has ended; only
the spans that others must know of begin while it runs. Importing this imports OpenTelemetry.
"""

from collections.abc import Mapping
from http import HTTPStatus
from time import monotonic_ns, time_ns
from typing import Final
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.util.types import AttributeValue

from gateway.http.headers import Header
from gateway.placement.planner import Plan
from gateway.telemetry.record import Outcome, RequestRecord
from gateway.types import Operation
from kvcontrol.tracing.outlet import Tracing, headers_of

_NS: Final = 1e9
_GEN_AI_OPERATIONS: Final = {
    Operation.CHAT: "chat",
    Operation.COMPLETIONS: "text_completion",
    Operation.EMBEDDINGS: "embeddings",
    Operation.RERANK: "rerank",
    Operation.RESPONSES: "chat",
    Operation.MESSAGES: "chat",
    Operation.GENERATE: "text_completion",
}
"""Names of the semantic conventions; the others keep ours."""
_FAILED: Final = frozenset(
    {Outcome.REFUSED, Outcome.SHED, Outcome.UPSTREAM_ERROR, Outcome.DEADLINE, Outcome.GATEWAY_ERROR}
)


class RequestTracer:
    """Begins traces; one for all requests."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def begin(self, record: RequestRecord, path: str, headers: Mapping[str, bytes | None]) -> "RequestTrace":
        """Begin a request's trace; ``headers`` are those that carry its caller's context."""
        carrier = {name: value.decode("latin-1") for name, value in headers.items() if value is not None}
        return RequestTrace(self._tracing, record, path, self._tracing.context_of(carrier))


class RequestTrace:
    """The spans of one request; the event loop. ``trace_id`` is None for a trace that isn't sampled."""

    def __init__(self, tracing: Tracing, record: RequestRecord, path: str, parent: Context) -> None:
        self._tracer = tracing.tracer
        self._record = record
        self._offset_ns = time_ns() - monotonic_ns()
        self._span = self._tracer.start_span(
            f"POST {path}",
            parent,
            SpanKind.SERVER,
            {"http.request.method": "POST", "http.route": path, "url.path": path},
            start_time=self._at(record.started_s),
        )
        self._context = set_span_in_context(self._span, Context())
        self._attempt: Span | None = None
        self._headers: list[Header] = headers_of(self._span.get_span_context())
        self._planned_from_s: float | None = None
        context = self._span.get_span_context()
        self.trace_id = f"{context.trace_id:032x}" if context.trace_flags.sampled else None

    @property
    def headers(self) -> list[Header]:
        """What an instance is sent, so that its spans are the attempt's."""
        return self._headers

    def planned(self, plan: Plan) -> None:
        """An attempt begins: ``record.sent_s`` is its time."""
        record = self._record
        begun_s = self._planned_from_s or record.admitted_s or record.sent_s
        self._step("plan", begun_s, record.sent_s, _decision(plan, record))
        name = _GEN_AI_OPERATIONS.get(record.operation, record.operation.value)
        self._attempt = self._tracer.start_span(
            f"{name} {record.model}",
            self._context,
            SpanKind.CLIENT,
            {
                "gen_ai.operation.name": name,
                "gen_ai.provider.name": "openai" if plan.instance.stats is None else plan.instance.stats.engine,
                "gen_ai.request.model": record.model or "",
                "gen_ai.request.stream": record.stream,
                **_server(plan.instance.url),
                "kvgate.instance": plan.instance.id,
                "kvgate.attempt": record.attempts,
            },
            start_time=self._at(record.sent_s),
        )
        self._headers = headers_of(self._attempt.get_span_context())

    def answering(self, now_s: float) -> None:
        """The legs before the answer are done: the request goes to the answering instance now."""
        plan = self._record.plan
        if self._attempt is not None and plan is not None and plan.prefill is not None:
            span = self._tracer.start_span(
                "prefill elsewhere",
                set_span_in_context(self._attempt, Context()),
                attributes={"kvgate.instance": plan.prefill.instance.id, "kvgate.tokens": plan.elsewhere_tokens},
                start_time=self._at(self._record.sent_s),
            )
            span.end(self._at(now_s))

    def failed(self, cause: str, now_s: float) -> None:
        """The attempt is over and another one follows."""
        self._planned_from_s = now_s
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.set_attribute("error.type", cause)
            attempt.set_status(Status(StatusCode.ERROR, f"tried elsewhere: {cause}"))
            attempt.end(self._at(now_s))

    def ended(self, outcome: Outcome, now_s: float) -> None:
        """The request is over; what the record says goes into the spans."""
        record = self._record
        begun_s = record.started_s
        for name, ended_s in (
            ("receive", record.received_s),
            ("parse", record.parsed_s),
            ("fingerprint", record.fingerprinted_s),
            ("admission", record.admitted_s),
        ):
            if ended_s is None:
                break
            tokens = record.prompt_tokens if name == "fingerprint" else None
            self._step(name, begun_s, ended_s, {} if tokens is None else {"kvgate.prompt_tokens": tokens})
            begun_s = ended_s
        if self._attempt is not None:
            self._end_attempt(self._attempt, outcome, now_s)
        span = self._span
        span.set_attributes(_request(record, outcome))
        if outcome in _FAILED:
            span.set_attribute("error.type", outcome.value)
            span.set_status(Status(StatusCode.ERROR, record.detail or outcome.value))
        if record.first_byte_s is not None:
            span.set_attribute("kvgate.first_byte_s", record.first_byte_s - record.started_s)
        span.end(self._at(now_s))

    def _end_attempt(self, span: Span, outcome: Outcome, now_s: float) -> None:
        record = self._record
        if record.first_byte_s is not None:
            span.add_event("first byte", timestamp=self._at(record.first_byte_s))
            if record.stream:
                span.set_attribute("gen_ai.response.time_to_first_chunk", record.first_byte_s - record.sent_s)
        if record.usage is not None:
            span.set_attribute("gen_ai.usage.input_tokens", record.usage.prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", record.usage.completion_tokens)
            if record.usage.cached_tokens is not None:
                span.set_attribute("gen_ai.usage.cache_read.input_tokens", record.usage.cached_tokens)
        if record.first_byte_s is not None and record.status is not None:
            span.set_attribute("http.response.status_code", record.status)
        if outcome in _FAILED or outcome is Outcome.CLIENT_ERROR:
            status = record.status if record.first_byte_s is not None and record.detail is None else None
            span.set_attribute("error.type", outcome.value if status is None else str(status))
            span.set_status(Status(StatusCode.ERROR, record.detail or outcome.value))
        span.end(self._at(now_s))

    def _step(self, name: str, begun_s: float, ended_s: float, attributes: Mapping[str, AttributeValue]) -> None:
        span = self._tracer.start_span(name, self._context, attributes=attributes, start_time=self._at(begun_s))
        span.end(self._at(ended_s))

    def _at(self, monotonic_s: float) -> int:
        """Nanoseconds since 1970, as spans have them."""
        return self._offset_ns + round(monotonic_s * _NS)


def _decision(plan: Plan, record: RequestRecord) -> dict[str, AttributeValue]:
    fields: dict[str, AttributeValue] = {
        "kvgate.policy": plan.policy,
        "kvgate.basis": plan.decision.basis,
        "kvgate.reason": plan.decision.reason,
        "kvgate.instance": plan.instance.id,
        "kvgate.matched_tokens": plan.matched_tokens,
        "kvgate.route": record.route,
    }
    if plan.predicted_s is not None:
        fields["kvgate.predicted_first_byte_s"] = plan.predicted_s
    return fields


def _request(record: RequestRecord, outcome: Outcome) -> dict[str, AttributeValue]:
    fields: dict[str, AttributeValue] = {
        "kvgate.request_id": record.request_id,
        "kvgate.outcome": outcome.value,
        "kvgate.attempts": record.attempts,
    }
    if record.status is not None:
        fields["http.response.status_code"] = record.status
    elif outcome is Outcome.GATEWAY_ERROR:
        fields["http.response.status_code"] = int(HTTPStatus.INTERNAL_SERVER_ERROR)
    if record.tenant is not None:
        fields["kvgate.tenant"] = record.tenant
    return fields


def _server(url: str) -> dict[str, AttributeValue]:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return {"server.address": parts.hostname or "", "server.port": port}
