"""``/kv/v1`` between an app and an agent's socket: bodies pass untouched, an engine that is gone is a 503 in time."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry, generate_latest

from engines.control.errors import EngineUnavailableError
from engines.control.operations import SNAPSHOT, STATS
from engines.events.log import EventLog
from engines.events.publisher import Endpoints, EventPublisher
from engines.lmdeploy.agent import COUNTERS, EventCounters
from engines.lmdeploy.http.admin import ControlClient, EngineCollector, mount
from engines.lmdeploy.loop_lag import LoopLag
from kvcontrol.core.blocks import CacheTier

ANY = "tcp://127.0.0.1:*"
COUNTED = EventCounters(
    seq=7,
    stored=20,
    removed=5,
    cleared=1,
    dropped=3,
    resyncs=2,
    hook_errors=4,
    eviction_errors=1,
    publisher_errors=0,
    resident_blocks={CacheTier.HBM: 15},
    pinned_blocks={CacheTier.HBM: 6},
)


def refuse(_: EventPublisher, _body: bytes) -> bytes:
    raise RuntimeError("no snapshot today")


@contextmanager
def agent_at(endpoint: str) -> Iterator[None]:
    publisher = EventPublisher(
        lambda wake: EventLog(block_size_tokens=1, clock=time.time, on_pending=wake),
        endpoints=Endpoints(events=ANY, replay=ANY, control=endpoint),
        operations={STATS: lambda *_: b'{"a":1}', SNAPSHOT: refuse, COUNTERS: lambda *_: msgspec.json.encode(COUNTED)},
    )
    publisher.start()
    try:
        yield
    finally:
        publisher.close()


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/control"


@contextmanager
def served(endpoint: str) -> Iterator[TestClient]:
    app = FastAPI()
    mount(app, ControlClient(endpoint, timeout_s=0.5), metrics=False)
    with TestClient(app) as client:
        yield client


def test_an_answer_is_passed_on_untouched(endpoint: str) -> None:
    with agent_at(endpoint), served(endpoint) as client:
        answer = client.get("/kv/v1/stats")
        assert (answer.status_code, answer.content) == (200, b'{"a":1}')
        assert answer.headers["content-type"] == "application/json"


def test_an_engine_that_is_gone_is_a_503_that_says_so_and_one_that_returns_is_heard(endpoint: str) -> None:
    with served(endpoint) as client:
        for path in ("/kv/v1/stats", "/kv/v1/snapshot"):
            answer = client.get(path)
            assert answer.status_code == 503
            error = answer.json()["error"]
            assert error["code"] == "engine_unavailable"
            assert "did not answer" in error["message"]
        with agent_at(endpoint):
            assert client.get("/kv/v1/stats").status_code == 200
        assert client.get("/kv/v1/stats").status_code == 503


def test_a_refusal_is_a_503_with_its_reason(endpoint: str) -> None:
    with agent_at(endpoint), served(endpoint) as client:
        answer = client.get("/kv/v1/snapshot")
        assert answer.status_code == 503
        assert "no snapshot today" in answer.json()["error"]["message"]


def test_many_clients_get_each_their_own_answer(endpoint: str) -> None:
    client = ControlClient(endpoint, timeout_s=20)
    answers: list[bytes] = []
    with agent_at(endpoint):
        threads = [
            threading.Thread(target=lambda: answers.append(client.ask_now(STATS, timeout_s=20))) for _ in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    client.close()
    assert answers == [b'{"a":1}'] * 16


def test_an_unknown_operation_is_an_error(endpoint: str) -> None:
    client = ControlClient(endpoint, timeout_s=5)
    with agent_at(endpoint), pytest.raises(EngineUnavailableError, match="unknown operation b'dance'"):
        client.ask_now(b"dance", timeout_s=5)
    client.close()


def test_the_series_show_the_counters_and_only_a_zero_when_the_engine_is_gone(endpoint: str) -> None:
    client = ControlClient(endpoint, timeout_s=5)
    registry = CollectorRegistry()
    registry.register(EngineCollector(client, LoopLag()))
    with agent_at(endpoint):
        # the scrape's own deadline is short: a machine under load gets several
        deadline = time.monotonic() + 20
        while "kvgate_engine_up 1.0" not in (text := generate_latest(registry).decode()):
            assert time.monotonic() < deadline
    for line in (
        'kvgate_engine_resident_blocks{tier="HBM"} 15.0',
        'kvgate_engine_pinned_blocks{tier="HBM"} 6.0',
        'kvgate_engine_kv_events_total{kind="stored"} 20.0',
        'kvgate_engine_kv_events_total{kind="removed"} 5.0',
        "kvgate_engine_kv_events_seq 7.0",
        "kvgate_engine_kv_events_dropped_total 3.0",
        "kvgate_engine_hook_errors_total 4.0",
        "kvgate_engine_eviction_errors_total 1.0",
    ):
        assert line in text
    text = generate_latest(registry).decode()
    client.close()
    assert "kvgate_engine_up 0.0" in text
    assert "kvgate_engine_kv" not in text
