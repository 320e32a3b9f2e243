"""A request's trace context (W3C): taken from its client, and sent to instances.

Where traces are made, an instance gets the attempt's context; otherwise the client's own, untouched like any header.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from gateway.http.exchange import Exchange
from gateway.http.headers import Header
from gateway.telemetry.record import RequestRecord

if TYPE_CHECKING:
    from gateway.telemetry.tracing import RequestTracer

_TRACEPARENT: Final = re.compile(rb"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")
_HEADERS: Final = ("traceparent", "tracestate")
_NAMES: Final = frozenset(name.encode() for name in _HEADERS)


def begin_trace(tracer: "RequestTracer | None", record: RequestRecord, exchange: Exchange, path: str) -> None:
    """Give a request its trace where traces are made, and the id that its examples and its log line carry."""
    if tracer is None:
        given = exchange.header(b"traceparent")
        found = None if given is None else _TRACEPARENT.fullmatch(given)
        record.trace_id = None if found is None else found[1].decode()
        return
    record.trace = tracer.begin(record, path, {name: exchange.header(name.encode()) for name in _HEADERS})
    record.trace_id = record.trace.trace_id


def with_context(headers: Sequence[Header], record: RequestRecord) -> Sequence[Header]:
    """Return the headers of an attempt: with its own context, where traces are made, instead of the client's."""
    if record.trace is None:
        return headers
    return [*(each for each in headers if each[0] not in _NAMES), *record.trace.headers]
