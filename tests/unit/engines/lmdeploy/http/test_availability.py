import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.testclient import TestClient

from engines.lmdeploy.http.availability import EngineGoneMiddleware


class _Engine:
    gone = False

    def is_gone(self) -> bool:
        return self.gone


@pytest.fixture
def engine() -> _Engine:
    return _Engine()


@pytest.fixture
def client(engine: _Engine) -> TestClient:
    app = FastAPI()
    app.add_middleware(EngineGoneMiddleware, gone=engine.is_gone)

    @app.get("/status/{status}")
    async def status(status: int, dies: bool = False) -> JSONResponse:  # noqa: FBT001, FBT002 - a query's field
        engine.gone = dies
        return JSONResponse({"said": status}, status_code=status)

    @app.get("/raises")
    async def raises(dies: bool = False) -> None:  # noqa: FBT001, FBT002
        engine.gone = dies
        raise RuntimeError("the handler failed")

    @app.get("/stream/{tokens}")
    async def stream(tokens: int) -> StreamingResponse:
        async def body() -> AsyncIterator[str]:
            for each in range(tokens):
                yield f"data: {each}\n\n"
            engine.gone = True
            yield f"data: {json.dumps({'error': {'message': 'An internal server error occurred.'}})}\n\n"

        return StreamingResponse(body(), media_type="text/event-stream")

    return TestClient(app, raise_server_exceptions=False)


def _assert_refused(answer: Any) -> None:
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_unavailable"


def test_what_fails_because_the_engine_is_gone_is_a_503(client: TestClient) -> None:
    _assert_refused(client.get("/status/500?dies=true"))


def test_what_fails_while_the_engine_lives_is_passed_on(client: TestClient) -> None:
    for status in (200, 400, 500):
        answer = client.get(f"/status/{status}")
        assert (answer.status_code, answer.json()) == (status, {"said": status})


def test_what_was_answered_before_the_engine_died_is_passed_on(client: TestClient) -> None:
    assert client.get("/status/200?dies=true").status_code == 200


def test_once_it_is_gone_all_is_refused(client: TestClient, engine: _Engine) -> None:
    engine.gone = True
    _assert_refused(client.get("/status/200"))


def test_a_handler_that_raises_is_a_503_only_when_the_engine_is_gone(client: TestClient) -> None:
    assert client.get("/raises").status_code == 500
    _assert_refused(client.get("/raises?dies=true"))


def test_a_stream_that_is_nothing_but_an_error_is_a_503(client: TestClient) -> None:
    _assert_refused(client.get("/stream/0"))


def test_a_stream_that_has_begun_ends_as_it_did(client: TestClient) -> None:
    answer = client.get("/stream/2")
    assert answer.status_code == 200
    assert answer.text.startswith("data: 0\n\ndata: 1\n\ndata: {")
