"""An instance's spans, with an app that stands for LMDeploy's: who calls, how it ends, and what the engine says."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from lmdeploy.messages import EngineEvent, EngineOutput, EventType, RequestMetrics, ResponseType
from lmdeploy.metrics.stats import RequestStats

from engines.lmdeploy.http.spans import SpanMiddleware, queue_update
from kvcontrol.tracing import Collector as Target
from kvcontrol.tracing.outlet import Tracing
from tests.support.collector import Collector, Seen, running_collector

CHAT = "POST /v1/chat/completions"
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ERROR = 2
told = queue_update(lambda _data: None)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with running_collector() as collector:
        yield collector


async def served(
    collector: Collector, app: Callable[..., Any], *, path: str = "/v1/chat/completions", **headers: str
) -> list[Seen]:
    """Ask once, and return the spans."""
    tracing = Tracing(Target(url=f"{collector.url}/v1/traces"), service="kvgate-engine")
    given = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def send(_message: Any) -> None:
        """Nobody reads it."""

    try:
        await SpanMiddleware(app, tracing)(
            {"type": "http", "method": "POST", "path": path, "headers": given}, send, send
        )
    finally:
        tracing.close()
    return collector.spans


def output(*tokens: int, at_s: float, status: ResponseType = ResponseType.SUCCESS) -> EngineOutput:
    events = [EngineEvent(EventType.QUEUED, 1000.0), EngineEvent(EventType.SCHEDULED, 1002.0)]
    metrics = RequestMetrics(token_timestamp=at_s, engine_events=events, cached_tokens=16)
    return EngineOutput(status, list(tokens), req_metrics=metrics)


async def answer(_scope: Any, _receive: Any, send: Any) -> None:
    stats = RequestStats(prompt_tokens=20)
    told((output(5, at_s=1003.0), stats, None, None))
    told((output(6, 7, at_s=1004.0), stats, None, None))
    told((output(at_s=1004.5, status=ResponseType.FINISH), stats, None, None))
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def test_what_the_engine_says_becomes_the_phases_of_its_callers_trace(collector: Collector) -> None:
    spans = await served(collector, answer, traceparent=f"00-{TRACE}-{CALLER}-01")
    found = {each.name: each for each in spans}
    request = found[CHAT]
    assert {each.trace_id for each in spans} == {TRACE}
    assert request.parent == CALLER
    assert request.attributes["http.response.status_code"] == 200
    assert [request.attributes[f"kvgate.{name}_tokens"] for name in ("prompt", "cached", "completion")] == [20, 16, 3]
    second = 1_000_000_000
    assert (found["queue"].start_ns, found["queue"].end_ns) == (1000 * second, 1002 * second)
    assert (found["prefill"].start_ns, found["prefill"].end_ns) == (1002 * second, 1003 * second)
    assert found["decode"].end_ns == 1004.5 * second
    assert found["prefill"].attributes == {"kvgate.tokens": 4}
    assert {each.parent for each in spans if each is not request} == {request.span_id}


async def test_each_of_several_answers_has_its_phases(collector: Collector) -> None:
    async def twice(_scope: Any, _receive: Any, _send: Any) -> None:
        first, second = RequestStats(prompt_tokens=20), RequestStats(prompt_tokens=20)
        for stats in (first, second, first):
            told((output(5, at_s=1003.0), stats, None, None))

    spans = await served(collector, twice)
    assert sorted(each.name for each in spans).count("prefill") == 2


async def test_an_aborted_request_has_no_times_and_is_a_span_all_the_same(collector: Collector) -> None:
    async def aborted(_scope: Any, _receive: Any, _send: Any) -> None:
        told((EngineOutput(ResponseType.CANCEL, []), RequestStats(prompt_tokens=20), None, None))

    (span,) = await served(collector, aborted)
    assert span.name == CHAT


async def test_an_error_is_recorded_as_one(collector: Collector) -> None:
    async def broken(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 503, "headers": []})

    (span,) = await served(collector, broken)
    assert (span.status, span.attributes["error.type"]) == (ERROR, "503")
    collector.spans.clear()

    async def raising(_scope: Any, _receive: Any, _send: Any) -> None:
        raise LookupError("the prompt is in here")

    with pytest.raises(LookupError):
        await served(collector, raising)
    (span,) = collector.spans
    assert (span.status, span.attributes["error.type"], span.message) == (ERROR, "LookupError", "LookupError")


async def test_only_inference_has_spans(collector: Collector) -> None:
    assert await served(collector, answer, path="/kv/v1/stats") == []


async def test_outside_a_traced_request_the_engines_words_pass(collector: Collector) -> None:
    passed: list[object] = []
    data = (output(5, at_s=time.time()), RequestStats(prompt_tokens=1), None, None)
    queue_update(passed.append)(data)
    assert passed == [data]
    assert collector.spans == []
