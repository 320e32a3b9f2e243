"""``GET /kv/v1/steps`` and the steps' series, from a timeline to a client."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from engines.events.log import EventLog
from engines.events.publisher import Endpoints, EventPublisher, without_publisher
from engines.lmdeploy.http.admin import ControlClient, mount
from engines.lmdeploy.schedule.step_clock import HostMoments
from engines.lmdeploy.schedule.step_metrics import step_series
from engines.lmdeploy.schedule.step_operations import StepOperations
from engines.lmdeploy.schedule.step_timeline import SentStep, StepTimeline
from kvcontrol.core.steps import STEP_KINDS

ANY = "tcp://127.0.0.1:*"


def ran(count: int) -> StepTimeline:
    timeline = StepTimeline(HostMoments())
    for number in range(count):
        kind = "decode" if number else "prefill"
        timeline.sent(
            SentStep(
                kind=kind,  # type: ignore[arg-type]
                reason="",
                sequences=3,
                tokens=3,
                history_tokens=0,
                pairs=0.0,
                answering=3,
                waiting=0,
                sent_s=0.0,
            )
        )
        timeline.take(is_decode=kind == "decode")
        timeline.begin()
        timeline.end()
    return timeline


@pytest.fixture
def scheduler() -> SimpleNamespace:
    return SimpleNamespace()


@pytest.fixture
def client(scheduler: SimpleNamespace, tmp_path: Path) -> Iterator[TestClient]:
    endpoint = f"ipc://{tmp_path}/control"
    publisher = EventPublisher(
        lambda wake: EventLog(block_size_tokens=1, clock=time.time, on_pending=wake),
        endpoints=Endpoints(events=ANY, replay=ANY, control=endpoint),
        operations=without_publisher(StepOperations(SimpleNamespace(scheduler=scheduler)).table()),
    )
    publisher.start()
    app = FastAPI()
    mount(app, ControlClient(endpoint, timeout_s=20), metrics=False)
    with TestClient(app) as served:
        yield served
    publisher.close()


def test_an_engine_that_has_computed_nothing_has_no_steps(client: TestClient) -> None:
    body = client.get("/kv/v1/steps").json()
    assert (body["steps"], body["summary"]["steps"], body["lost"]) == ([], 0, 0)
    assert body["totals"]["steps"] == dict.fromkeys(STEP_KINDS, 0)


def test_a_client_gets_the_steps_that_it_asks_for(client: TestClient, scheduler: SimpleNamespace) -> None:
    scheduler.kvgate_steps = ran(5)
    body = client.get("/kv/v1/steps").json()
    assert [step["number"] for step in body["steps"]] == [1, 2, 3, 4, 5]
    assert (body["clock"], body["totals"]["steps"]["decode"], body["summary"]["decode"]["count"]) == ("wall", 4, 4)
    assert [step["number"] for step in client.get("/kv/v1/steps?last=2").json()["steps"]] == [4, 5]
    assert [step["number"] for step in client.get("/kv/v1/steps?after=3&last=10").json()["steps"]] == [4, 5]
    assert client.get("/kv/v1/steps?last=0").json()["steps"] == []


@pytest.mark.parametrize("query", ["last=-1", "last=8193", "last=x", "after=-2", "after=1.5", "first=3"])
def test_a_query_that_is_not_allowed_is_refused_with_what_is(client: TestClient, query: str) -> None:
    answer = client.get(f"/kv/v1/steps?{query}")
    assert answer.status_code == 400
    assert "last: 0 to 8192 steps; after: the number of a step" in answer.json()["error"]["message"]


def test_the_series_count_each_step_once() -> None:
    families = {family.name: family for family in step_series(ran(4).counts())}
    samples = {
        (sample.name, *sample.labels.values()): sample.value for each in families.values() for sample in each.samples
    }
    assert samples["kvgate_engine_step_seconds_count", "decode"] == 3
    assert samples["kvgate_engine_step_seconds_count", "prefill"] == 1
    assert samples["kvgate_engine_step_sequences_sum", "decode"] == 9
    assert samples["kvgate_engine_step_sequences_bucket", "decode", "2.0"] == 0
    assert samples["kvgate_engine_step_sequences_bucket", "decode", "4.0"] == 3
    assert samples["kvgate_engine_step_tokens_total", "prefill"] == 3
    assert samples["kvgate_engine_steps_lost_total",] == 0
