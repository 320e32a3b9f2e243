"""An OTLP/HTTP collector on a real loopback socket: it decodes what it is sent and keeps the spans."""

import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True, slots=True)
class Seen:
    """One span as it arrived; ids are hex, ``parent`` is empty for none."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    status: int
    message: str
    events: dict[str, int]
    state: str


@dataclass(slots=True)
class Collector:
    """``status`` is what it answers; while ``stuck`` is set it answers nobody."""

    url: str = ""
    status: int = 200
    stuck: threading.Event = field(default_factory=threading.Event)
    spans: list[Seen] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)

    def of(self, trace_id: str) -> list[Seen]:
        return [each for each in list(self.spans) if each.trace_id == trace_id]

    def named(self, name: str) -> list[Seen]:
        return [each for each in list(self.spans) if each.name == name]

    def has(self, *names: str) -> Callable[[], bool]:
        """A condition: spans of all these names have come."""
        return lambda: set(names) <= {each.name for each in list(self.spans)}


@contextmanager
def running_collector() -> Iterator[Collector]:
    """Run one while the block runs."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            if collector.stuck.is_set():
                released.wait(60)
            if self.path == "/v1/traces" and collector.status == 200:
                collector.raw.append(body)
                collector.spans.extend(_spans(body))
            self.send_response(collector.status if self.path == "/v1/traces" else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    released = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collector
    finally:
        released.set()
        server.shutdown()
        server.server_close()
        thread.join(10)


def _spans(body: bytes) -> Iterator[Seen]:
    message = ExportTraceServiceRequest.FromString(body)
    for resource in message.resource_spans:
        service = _values(resource.resource.attributes)["service.name"]
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Seen(
                    service=service,
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    kind=span.kind,
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    attributes=_values(span.attributes),
                    status=span.status.code,
                    message=span.status.message,
                    events={each.name: each.time_unix_nano for each in span.events},
                    state=span.trace_state,
                )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


__all__ = ["Collector", "Seen", "running_collector"]
