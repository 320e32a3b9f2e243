"""Spans, and how they leave: over a bounded queue, on a thread of their own.

OpenTelemetry's batch processor forgets the oldest span when its queue is full, and says so nowhere that a metric could
be made of. So what stands in front of it counts, and lets nothing in that would push another one out. A collector that
is slow or gone costs spans, never a request's time. Importing this imports OpenTelemetry's SDK.
"""

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Thread

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvcontrol.tracing.collector import Collector

_LONGEST_CLOSE_S = 3.0


@dataclass(slots=True)
class SpanCounts:
    """Spans that ended: sent, not taken by the collector, and dropped as the queue was full."""

    exported: int = 0
    failed: int = 0
    dropped: int = 0


class _CountingExporter(SpanExporter):
    """Called on the processor's thread alone."""

    def __init__(self, inner: SpanExporter, counts: SpanCounts) -> None:
        self._inner = inner
        self._counts = counts
        self.taken = 0
        """Spans that have left the queue."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                self._counts.exported += len(spans)
            else:
                self._counts.failed += len(spans)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


class _BoundedProcessor(SpanProcessor):
    """Lets no more into the queue than it holds. Spans end on one thread."""

    def __init__(self, exporter: SpanExporter, collector: Collector, counts: SpanCounts) -> None:
        self._counts = counts
        self._exporter = _CountingExporter(exporter, counts)
        self._capacity = collector.queue_spans
        self._let_in = 0
        self._inner = BatchSpanProcessor(
            self._exporter,
            max_queue_size=collector.queue_spans,
            max_export_batch_size=collector.batch_spans,
            schedule_delay_millis=collector.pause_s * 1000,
        )

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing is kept of what hasn't ended."""

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._let_in - self._exporter.taken >= self._capacity:
            self._counts.dropped += 1
            return
        self._let_in += 1
        self._inner.on_end(span)

    def shutdown(self) -> None:
        self._inner.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


class Tracing:
    """Makes a service's spans; ``counts`` says what became of those that ended. Nothing of it is global."""

    def __init__(self, collector: Collector, *, service: str, exporter: SpanExporter | None = None) -> None:
        """``exporter`` sends them; without one they go out as OTLP over HTTP.

        ``OTEL_SERVICE_NAME``, ``OTEL_RESOURCE_ATTRIBUTES`` and ``OTEL_TRACES_SAMPLER`` are honoured.
        """
        self.counts = SpanCounts()
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)  # one line for an export that failed, none for tries
        exporter = exporter or OTLPSpanExporter(endpoint=collector.url, timeout=collector.timeout_s)
        known = Resource.create().attributes  # what the variables say
        named = known.get(SERVICE_NAME)
        own = {SERVICE_NAME: service} if named is None or str(named).startswith("unknown_service") else {}
        resource = Resource.create({SERVICE_INSTANCE_ID: uuid.uuid4().hex, **own})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(_BoundedProcessor(exporter, collector, self.counts))
        self._propagator = TraceContextTextMapPropagator()
        self.tracer: Tracer = self._provider.get_tracer("kvgate")

    def context_of(self, headers: Mapping[str, str]) -> Context:
        """Return the caller's context (W3C ``traceparent`` and ``tracestate``), an empty one where there is none."""
        return self._propagator.extract(headers, Context())

    def close(self) -> None:
        """Send what waits, for at most ``_LONGEST_CLOSE_S``; blocks."""
        closing = Thread(target=self._provider.shutdown, daemon=True, name="kvgate-spans-close")
        closing.start()
        closing.join(_LONGEST_CLOSE_S)


def headers_of(context: SpanContext) -> list[tuple[bytes, bytes]]:
    """Return the W3C headers that make another one's spans children of this one."""
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags) & 1:02x}"
    headers = [(b"traceparent", parent.encode())]
    if context.trace_state:
        headers.append((b"tracestate", context.trace_state.to_header().encode()))
    return headers
