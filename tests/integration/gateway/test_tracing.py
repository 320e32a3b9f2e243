"""One trace for each request, seen by a collector that speaks OTLP over HTTP."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import SettingsError
from gateway.settings import Settings
from gateway.wiring.app import build_app
from tests.support.collector import Collector, Seen, running_collector
from tests.support.fleet import CHAT, Fleet, chat, running_fleet, script
from tests.support.running_gateway import eventually
from tests.support.scripted_engine import MODEL, ScriptedEngine

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
ROOT, ATTEMPT = f"POST {CHAT}", f"chat {MODEL}"
SERVER, CLIENT, ERROR = 2, 3, 2
PROMPT_TEXT = "the-prompt-is-nobodys-business"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with running_collector() as collector:
        yield collector


async def ask(fleet: Fleet, *, stream: bool = False, model: str = MODEL, **headers: str) -> int:
    body = chat(stream=stream, model=model, messages=[{"role": "user", "content": PROMPT_TEXT}])
    async with fleet.gateway.post(CHAT, body, **headers) as answer:
        await answer.read()
        return int(answer.status)


async def arrived(collector: Collector, *names: str) -> dict[str, Seen]:
    await eventually(collector.has(*names))
    return {each.name: each for each in collector.spans}


async def test_a_stream_is_one_trace_from_its_arrival_to_its_last_byte(tmp_path: Path, collector: Collector) -> None:
    async with running_fleet(tmp_path, otlp_endpoint=collector.url) as fleet:
        assert await ask(fleet, stream=True, x_script=script(chunks=4, chunk_s=0.02)) == 200
        spans = await arrived(collector, ROOT)
    root, attempt = spans[ROOT], spans[ATTEMPT]
    steps = [spans[name] for name in ("receive", "parse", "fingerprint", "admission", "plan")]
    assert {each.trace_id for each in collector.spans} == {root.trace_id}
    assert {each.service for each in collector.spans} == {"kvgate-gateway"}
    assert root.parent == ""
    assert {each.parent for each in (*steps, attempt)} == {root.span_id}
    assert (root.kind, attempt.kind) == (SERVER, CLIENT)
    times = [root.start_ns, *(each.start_ns for each in steps), attempt.start_ns, attempt.end_ns]
    assert times == sorted(times)
    assert attempt.end_ns == root.end_ns
    first = attempt.events["first byte"]
    assert root.end_ns - first > 50_000_000, "the chunks that followed are within it"
    assert attempt.attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert root.status == attempt.status == 0
    sent = fleet.last_headers()["traceparent"]
    assert sent == f"00-{root.trace_id}-{attempt.span_id}-01"


async def test_an_attempt_says_what_the_semantic_conventions_name(tmp_path: Path, collector: Collector) -> None:
    engine = ScriptedEngine()
    async with running_fleet(tmp_path, {"a": engine}, otlp_endpoint=collector.url) as fleet:
        async with fleet.gateway.post(CHAT, chat()) as answer:
            usage = (await answer.json())["usage"]
        spans = await arrived(collector, ROOT)
    said = spans[ATTEMPT].attributes
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.request.model"] == MODEL
    assert said["gen_ai.provider.name"] == "scripted", "the engine says so"
    assert said["gen_ai.request.stream"] is False
    assert said["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert said["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert said["gen_ai.usage.cache_read.input_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert (said["server.address"], said["server.port"]) == ("127.0.0.1", int(engine.url.rpartition(":")[2]))
    assert said["kvgate.instance"] == "a"
    assert spans["plan"].attributes["kvgate.policy"] == "cost_aware"
    assert spans[ROOT].attributes["http.response.status_code"] == 200
    assert spans[ROOT].attributes["kvgate.outcome"] == "ok"


async def test_a_callers_context_is_honoured(tmp_path: Path, collector: Collector) -> None:
    async with running_fleet(tmp_path, otlp_endpoint=collector.url) as fleet:
        assert await ask(fleet, traceparent=f"00-{TRACE}-{CALLER}-01", tracestate="vendor=1", baggage="k=v") == 200
        spans = await arrived(collector, ROOT)
        sent = fleet.last_headers()
    assert spans[ROOT].trace_id == TRACE
    assert spans[ROOT].parent == CALLER
    assert spans[ROOT].state == "vendor=1"
    assert sent["traceparent"] == f"00-{TRACE}-{spans[ATTEMPT].span_id}-01"
    assert sent["tracestate"] == "vendor=1"
    assert sent["baggage"] == "k=v"


async def test_a_caller_that_doesnt_sample_gets_no_spans_and_its_choice_is_passed_on(
    tmp_path: Path, collector: Collector
) -> None:
    async with running_fleet(tmp_path, otlp_endpoint=collector.url) as fleet:
        assert await ask(fleet, traceparent=f"00-{TRACE}-{CALLER}-00") == 200
        sent = fleet.last_headers()["traceparent"]
        assert sent.startswith(f"00-{TRACE}-")
        assert sent.endswith("-00")
        assert await ask(fleet) == 200
        await arrived(collector, ROOT)
        assert collector.of(TRACE) == []


async def test_every_attempt_has_its_span_and_its_error(tmp_path: Path, collector: Collector) -> None:
    async with running_fleet(tmp_path, otlp_endpoint=collector.url) as fleet:
        assert await ask(fleet, x_script=script(die_after=0)) in {502, 503}
        spans = await arrived(collector, ROOT)
    attempts = sorted(collector.named(ATTEMPT), key=lambda each: each.start_ns)
    assert len(attempts) == 2
    assert len(collector.named("plan")) == 2
    assert {each.attributes["kvgate.instance"] for each in attempts} == {"a", "b"}
    assert [each.status for each in attempts] == [ERROR, ERROR]
    assert attempts[0].attributes["error.type"] == "no_answer"
    assert spans[ROOT].status == ERROR
    assert spans[ROOT].attributes["error.type"] == "upstream_error"
    assert spans[ROOT].attributes["kvgate.attempts"] == 2


async def test_an_instances_refusal_and_a_request_that_comes_no_further_are_recorded(
    tmp_path: Path, collector: Collector
) -> None:
    async with running_fleet(tmp_path, otlp_endpoint=collector.url) as fleet:
        assert await ask(fleet, x_script=script(status=400)) == 400
        spans = await arrived(collector, ROOT)
        assert spans[ATTEMPT].attributes["error.type"] == "400"
        assert spans[ATTEMPT].status == ERROR
        assert spans[ROOT].status == 0, "a client's mistake is no error of the server"
        collector.spans.clear()
        assert await ask(fleet, model="nobody-serves-this") == 404
        spans = await arrived(collector, ROOT)
        assert spans.keys() == {ROOT, "receive"}
        assert spans[ROOT].attributes["kvgate.outcome"] == "client_error"
        assert not any(b"nobody-serves-this" in each for each in collector.raw)


async def test_a_client_that_leaves_ends_its_trace(tmp_path: Path, collector: Collector) -> None:
    async with running_fleet(tmp_path, otlp_endpoint=collector.url) as fleet:
        answer = await fleet.gateway.post(CHAT, chat(stream=True), x_script=script(chunks=1000, chunk_s=0.05))
        await answer.content.readany()
        answer.close()
        spans = await arrived(collector, ROOT)
    assert spans[ROOT].attributes["kvgate.outcome"] == "cancelled"
    assert ATTEMPT in spans


async def test_no_text_and_no_key_is_in_any_span(tmp_path: Path, collector: Collector) -> None:
    async with running_fleet(tmp_path, otlp_endpoint=collector.url) as fleet:
        assert await ask(fleet, stream=True, authorization="Bearer sk-secret", x_script=script(text="answered")) == 200
        await arrived(collector, ROOT)
    for word in (PROMPT_TEXT, "answered", "sk-secret"):
        assert not any(word.encode() in each for each in collector.raw)


async def test_exemplars_and_the_log_carry_the_trace(
    tmp_path: Path, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gateway.request")
    async with running_fleet(tmp_path, otlp_endpoint=collector.url) as fleet:
        assert await ask(fleet, stream=True) == 200
        spans = await arrived(collector, ROOT)
        async with fleet.gateway.get("/metrics", accept="application/openmetrics-text;version=1.0.0") as answer:
            text = await answer.text()
    trace = spans[ROOT].trace_id
    assert any(
        line.startswith("kvgate_first_byte_seconds_bucket") and f'trace_id="{trace}"' in line
        for line in text.splitlines()
    )
    fields: Any = caplog.records[-1]
    assert fields.kvgate_fields["trace_id"] == trace


@pytest.mark.parametrize("broken", ["unreachable", "refusing", "stuck"])
async def test_a_collector_that_takes_nothing_costs_spans_and_no_request(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    url = collector.url
    if broken == "unreachable":
        url = "http://127.0.0.1:1"
    elif broken == "refusing":
        collector.status = 400
    else:
        collector.stuck.set()
    async with running_fleet(tmp_path, otlp_endpoint=url) as fleet:
        async with asyncio.timeout(20):
            assert {await ask(fleet) for _ in range(20)} == {200}

        async def counted() -> bool:
            metric = fleet.gateway.metric
            dropped = await metric('kvgate_trace_spans_total{outcome="dropped"}')
            failed = await metric('kvgate_trace_spans_total{outcome="failed"}')
            return failed > 0 and (dropped > 0 or broken == "refusing")

        await eventually(counted)
    assert collector.spans == []


async def test_spans_are_counted(tmp_path: Path, collector: Collector) -> None:
    async with running_fleet(tmp_path, otlp_endpoint=collector.url) as fleet:
        assert await ask(fleet) == 200
        await arrived(collector, ROOT)
        await fleet.gateway.counted('kvgate_trace_spans_total{outcome="exported"}', len(collector.spans))
        assert await fleet.gateway.metric('kvgate_trace_spans_total{outcome="dropped"}') == 0


async def test_what_waits_is_sent_when_the_gateway_stops(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    async with running_fleet(tmp_path, otlp_endpoint=collector.url) as fleet:
        assert await ask(fleet) == 200
        assert collector.spans == []
    assert collector.named(ROOT)


async def test_the_standard_variable_turns_it_on_too(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    async with running_fleet(tmp_path) as fleet:
        assert await ask(fleet) == 200
        spans = await arrived(collector, ROOT)
    assert spans[ROOT].service == "mine"


async def test_off_nothing_is_sent_and_a_callers_context_passes_untouched(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        assert await ask(fleet, traceparent=f"00-{TRACE}-{CALLER}-01", tracestate="vendor=1") == 200
        assert fleet.last_headers()["traceparent"] == f"00-{TRACE}-{CALLER}-01"
        assert fleet.last_headers()["tracestate"] == "vendor=1"
        async with fleet.gateway.get("/metrics") as answer:
            assert "kvgate_trace_spans" not in await answer.text()


def test_off_the_sdk_is_not_imported(tmp_path: Path) -> None:
    said = (
        "import sys; from pathlib import Path; "
        "from gateway.wiring.app import build_app; from gateway.settings import Settings; "
        f"build_app(Settings(state_dir=Path({str(tmp_path)!r}))); "
        "print([each for each in sys.modules if each.startswith('opentelemetry.sdk')])"
    )
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_a_collector_that_can_be_none_is_refused_at_the_start(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path, otlp_endpoint="localhost:4317")
    with pytest.raises(SettingsError, match=r"KVGATE_OTLP_ENDPOINT='localhost:4317'.*http://127\.0\.0\.1:4318"):
        build_app(settings)
