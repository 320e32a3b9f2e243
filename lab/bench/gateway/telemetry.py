"""What it costs to account a request: its marks on the way, and settling it, with and without its log line; what the
places for traces cost while there are none, and what a trace does.

The record is that of a stream that was planned by cost and answered, and whose usage is known: every series of a
request is counted. Processor time of the thread, the median of several rounds. A trace's is that of the event loop:
what waits for the collector is encoded and sent on another thread.
"""

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from gateway.fingerprint import Fingerprint
from gateway.http.exchange import Exchange, Message
from gateway.placement.planner import Plan, Planner
from gateway.registry import Instance, InstanceState, LoadTracker
from gateway.routing import POLICIES, Calibration, CostModel, LearnedAffinity, RecentRoutes
from gateway.telemetry import Metrics, Outcome, RequestRecord, Telemetry
from gateway.telemetry.logs import formatter
from gateway.telemetry.trace_context import begin_trace, with_context
from gateway.types import Operation, RequestId, TenantId, Usage
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.hashing import token_bytes
from kvcontrol.core.ids import InstanceId
from kvcontrol.prefix_reuse import FleetIndex
from kvcontrol.tracing import Collector

_COSTS = CostModel(prefill_tokens_per_s=2000, decode_load_s=0.02)
_HEADERS = [
    (b"host", b"127.0.0.1:8000"),
    (b"authorization", b"Bearer sk-0123456789abcdef"),
    (b"content-type", b"application/json"),
    (b"accept", b"application/json"),
    (b"user-agent", b"OpenAI/Python 2.45.0"),
    (b"content-length", b"4096"),
]
_SCOPE: dict[str, object] = {"headers": _HEADERS, "method": "POST", "path": "/v1/chat/completions"}
_MARKS = ("received_s", "parsed_s", "fingerprinted_s", "admitted_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryPlan:
    """Requests in a round, and rounds."""

    requests: int = 20_000
    rounds: int = 7
    traces: int = 300
    """Requests in a round with a trace: their spans are kept until the end."""


def run(plan: TelemetryPlan) -> dict[str, float]:
    """Return microseconds by name."""
    planned = _plan()
    telemetry = Telemetry(Metrics())
    record = _record(planned)
    log = logging.getLogger("gateway.request")
    kept, log.propagate = (log.level, log.propagate), False
    line = logging.StreamHandler(_Nowhere())
    line.setFormatter(formatter("json"))
    log.addHandler(line)
    try:
        log.setLevel(logging.WARNING)
        settle_us = _median_us(lambda: telemetry.settle(record), plan)
        log.setLevel(logging.INFO)
        logged_us = _median_us(lambda: telemetry.settle(record), plan)
    finally:
        log.removeHandler(line)
        log.setLevel(kept[0])
        log.propagate = kept[1]
    marks_us = _median_us(lambda: _mark(record), plan)
    pause_us = _median_us(lambda: telemetry.paused(0.02), plan)
    exchange = _exchange()
    off_us = _median_us(lambda: _untraced(record, exchange), plan)
    return {
        "marks_us_per_request": marks_us,
        "settle_us_per_request": settle_us,
        "metrics_us_per_request": marks_us + settle_us,
        "pause_us_per_streamed_piece": pause_us,
        "tracing_off_us_per_request": off_us,
        "metrics_and_tracing_off_us_per_request": marks_us + settle_us + off_us,
        "log_line_us_per_request": logged_us - settle_us,
        "tracing_on_us_per_request": _traced_us(planned, plan),
    }


def _untraced(record: RequestRecord, exchange: Exchange) -> None:
    """All that is done about traces where there are none."""
    begin_trace(None, record, exchange, "/v1/chat/completions")
    with_context(_HEADERS, record)
    record.answering()


def _traced_us(planned: Plan, plan: TelemetryPlan) -> float:
    """A trace of a stream with one attempt, and its context to the instance; nothing is sent meanwhile."""
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from gateway.telemetry.tracing import RequestTracer
    from kvcontrol.tracing.outlet import Tracing

    target = Collector(url="http://127.0.0.1:1/v1/traces", queue_spans=1 << 20, batch_spans=1 << 20, pause_s=86_400)
    tracing = Tracing(target, service="kvgate-gateway", exporter=InMemorySpanExporter())
    tracer = RequestTracer(tracing)

    def trace() -> None:
        record = _record(planned)
        begin_trace(tracer, record, _exchange(), "/v1/chat/completions")
        record.planned(planned)
        with_context(_HEADERS, record)
        record.answering()
        if record.trace is not None:
            record.trace.ended(Outcome.OK, time.monotonic())

    def bare() -> None:
        _record(planned)

    bare_us = _median_us(bare, plan)
    try:
        return _median_us(trace, replace(plan, requests=min(plan.traces, plan.requests))) - bare_us
    finally:
        tracing.close()


def _exchange() -> Exchange:
    async def receive() -> Message:
        return {}

    async def send(_: Message) -> None:
        """Nobody is there."""

    return Exchange(_SCOPE, receive, send, send_timeout_s=1.0)


class _Nowhere:
    """A stream that forgets."""

    def write(self, _: str) -> None:
        """Take a line."""

    def flush(self) -> None:
        """Nothing is kept."""


def _mark(record: RequestRecord) -> None:
    for name in _MARKS:
        setattr(record, name, time.monotonic())


def _record(plan: Plan) -> RequestRecord:
    now_s = time.monotonic()
    record = RequestRecord(
        operation=Operation.CHAT,
        request_id=RequestId("0123456789abcdef"),
        started_s=now_s - 1,
        tenant=TenantId("acme"),
        model="m",
        stream=True,
    )
    record.received_s = record.parsed_s = record.fingerprinted_s = record.admitted_s = now_s - 0.999
    record.planned(plan)
    record.sent_s = now_s - 0.998
    record.first_byte_s = now_s - 0.9
    record.status = 200
    record.outcome = Outcome.OK
    record.usage = Usage(prompt_tokens=1_000, completion_tokens=50, cached_tokens=800)
    return record


def _plan() -> Plan:
    index = FleetIndex()
    planner = Planner(
        policy=POLICIES["cost_aware"](_COSTS),
        index=index,
        load=LoadTracker(),
        recent=RecentRoutes(lifetime_s=10),
        learned=LearnedAffinity(index, capacity_tokens=1 << 20),
        calibration=Calibration(_COSTS),
        clock=time.monotonic,
    )
    instances = [
        Instance(id=InstanceId(name), url=f"http://{name}", state=InstanceState.HEALTHY, reason="", models=())
        for name in ("a", "b")
    ]
    prompt = Fingerprint(token_bytes(list(range(1_000))), model="m", salt="s")
    first = planner.plan(prompt, instances)
    planner.computed(first)
    plan = planner.plan(prompt, instances)
    # As of an instance that announces its blocks, in two tiers.
    candidate = plan.decision.candidate._replace(tokens_by_tier={CacheTier.HBM: 512, CacheTier.DDR: 256})
    return plan._replace(decision=plan.decision._replace(candidate=candidate), matched_tokens=768)


def _median_us(step: Callable[[], None], plan: TelemetryPlan) -> float:
    times = []
    for _ in range(plan.rounds):
        started = time.thread_time()
        for _ in range(plan.requests):
            step()
        times.append((time.thread_time() - started) / plan.requests)
    return statistics.median(times) * 1e6
