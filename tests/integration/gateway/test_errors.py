"""Every failure leaves as OpenAI's envelope, with the status it deserves."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from yarl import URL

from gateway.version import installed_version
from tests.support.fleet import CHAT, COMPLETIONS, Fleet, chat, running_fleet, script
from tests.support.running_gateway import running_gateway
from tests.support.scripted_engine import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """One for all tests: what is refused leaves nothing behind."""
    async with running_fleet(tmp_path_factory.mktemp("fleet")) as running:
        yield running


def envelope_in(text: str) -> dict[str, object]:
    error: dict[str, object] = json.loads(text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    return error


BAD_BODIES = {
    "empty": b"",
    "not JSON": b"{model",
    "a list": b"[]",
    "deeply nested": b'{"model":"scripted","messages":[{"role":"user","content":"x"}],"x":'
    + b"[" * 10_000
    + b"]" * 10_000
    + b"}",
    "bad UTF-8": b'{"model":"scripted","messages":[{"role":"user","content":"\xff\xfe"}]}',
    "NaN": b'{"model":"scripted","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
    "a key twice": b'{"model":"scripted","messages":[{"role":"user","content":"x"}],"model":"other"}',
    "a key twice, once escaped": b'{"model":"scripted","messages":[{"role":"user","content":"x"}],"mod\\u0065l":"o"}',
    "a key twice, and a long number": b'{"model":"scripted","messages":[{"role":"user","content":"x"}],"x":1,"x":'
    + b"1" * 5_000
    + b"}",
    "trailing text": b'{"model":"scripted","messages":[{"role":"user","content":"x"}]} {}',
}


NESTED = {
    CHAT: '{"model":"scripted","messages":[{"role":"user","content":"x"}],'
    '"tools":[{"type":"function","function":{"name":"f","parameters":DEEP}}]}',
    "/v1/responses": '{"model":"scripted","input":[{"role":"user","content":"x","more":DEEP}]}',
    "/v1/messages": '{"model":"scripted","max_tokens":1,"messages":[{"role":"assistant","content":'
    '[{"type":"tool_use","id":"i","name":"n","input":{"a":DEEP}}]}]}',
}


@pytest.mark.parametrize(("path", "body"), NESTED.items(), ids=NESTED.keys())
async def test_no_depth_of_a_body_is_a_failure_of_the_gateway(fleet: Fleet, path: str, body: str) -> None:
    for depth in range(880, 1_000, 2):  # Python takes about a thousand frames, each step's own among them
        async with fleet.gateway.post(path, body.replace("DEEP", "[" * depth + "]" * depth).encode()) as answer:
            said = await answer.text()
            assert "the gateway failed" not in said
            assert answer.status in {200, 400, 404}


async def test_a_clients_own_chat_template_is_refused_and_runs_nowhere(fleet: Fleet) -> None:
    before = fleet.requests
    body = chat() | {"chat_template_kwargs": {"chat_template": "{{ 1 / 0 }}"}}
    async with fleet.gateway.post(CHAT, body) as answer:
        assert answer.status == 400
        assert envelope_in(await answer.text())["param"] == "chat_template_kwargs.chat_template"
    assert fleet.requests == before


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES.keys())
async def test_a_malformed_body_is_a_400_and_never_reaches_an_engine(fleet: Fleet, body: bytes) -> None:
    before = fleet.requests
    async with fleet.gateway.post(CHAT, body) as answer:
        assert answer.status == 400
        assert answer.content_type == "application/json"
        assert answer.headers["x-request-id"]
        envelope_in(await answer.text())
    assert fleet.requests == before


WRONG_FIELDS = [
    (CHAT, {"messages": []}, 400, "model"),
    (CHAT, {"model": MODEL}, 400, "messages"),
    (CHAT, {"model": 7, "messages": []}, 400, "model"),
    (CHAT, {"model": MODEL, "messages": "hi"}, 400, "messages"),
    (CHAT, {"model": MODEL, "messages": ["hi"]}, 400, "messages[0]"),
    (CHAT, {"model": MODEL, "messages": [{"content": "hi"}]}, 400, "messages[0].role"),
    (CHAT, {"model": MODEL, "messages": [{"role": "user", "content": 7}]}, 400, "messages[0].content"),
    (CHAT, {"model": MODEL, "messages": [{"role": "user", "content": ["x"]}]}, 400, "messages[0].content[0]"),
    (CHAT, chat(stream="yes"), 400, "stream"),
    (CHAT, chat(stream=True, stream_options=[]), 400, "stream_options"),
    (CHAT, chat(model="nobody-serves-this"), 404, "model"),
    (COMPLETIONS, {"model": MODEL}, 400, "prompt"),
    (COMPLETIONS, {"model": MODEL, "prompt": {}}, 400, "prompt"),
    (COMPLETIONS, {"prompt": "x"}, 400, "model"),
    (COMPLETIONS, {"model": MODEL, "prompt": ""}, 400, "prompt"),
    (COMPLETIONS, {"model": MODEL, "prompt": []}, 400, "prompt"),
    (COMPLETIONS, {"model": MODEL, "prompt": [-1]}, 400, "prompt[0]"),
    (CHAT, {"model": MODEL, "messages": []}, 400, "messages"),
    (CHAT, {"model": MODEL, "messages": [], "input_ids": [-1]}, 400, "input_ids[0]"),
    (CHAT, chat(with_cache=True), 400, "with_cache"),
    (CHAT, chat(migration_request={}), 400, "migration_request"),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), WRONG_FIELDS)
async def test_a_wrong_field_is_named(
    fleet: Fleet, path: str, body: dict[str, object], status: int, param: str
) -> None:
    before = fleet.requests
    async with fleet.gateway.post(path, body) as answer:
        assert answer.status == status
        assert envelope_in(await answer.text())["param"] == param
    assert fleet.requests == before


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/v1/nothing", 404, None),
        ("GET", "/v1", 404, None),
        ("GET", "/nothing", 404, None),
        ("GET", CHAT, 405, "POST"),
        ("POST", "/v1/models", 405, "GET, HEAD"),
        ("POST", "/healthz", 405, "GET, HEAD"),
        ("DELETE", "/metrics", 405, "GET, HEAD"),
        ("OPTIONS", "/dashboard", 405, "GET, HEAD"),
        ("PATCH", "/admin/v1/tenants/acme", 405, "DELETE, GET, HEAD, PUT"),
    ],
)
async def test_unknown_routes_and_methods_get_an_envelope(
    fleet: Fleet, method: str, path: str, status: int, allow: str | None
) -> None:
    async with fleet.gateway.session.request(method, fleet.gateway.url + path, allow_redirects=False) as answer:
        assert answer.status == status
        assert answer.headers.get("allow") == allow
        envelope_in(await answer.text())


@pytest.mark.parametrize("status", [400, 401, 404, 409, 422, 429, 500])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engines_status_is_kept_its_shape_is_mended_and_it_is_not_tried_again(
    fleet: Fleet, *, status: int, stream: bool
) -> None:
    how, before = script(status=status, retry_after="7"), fleet.requests
    async with fleet.gateway.post(CHAT, chat(stream=stream), x_script=how) as answer:
        assert answer.status == status
        assert answer.headers["retry-after"] == "7"
        assert answer.headers["x-kvgate-instance"]
        error = envelope_in(await answer.text())
    assert error["message"] == f"scripted {status}"
    assert error["type"] == "engine_said"
    assert fleet.requests == before + 1


async def test_a_right_envelope_passes_unchanged_and_is_counted_once(fleet: Fleet) -> None:
    line = 'kvgate_requests_total{operation="chat_completions",outcome="client_error"}'
    before = await fleet.gateway.metric(line)
    async with fleet.gateway.post(CHAT, chat(), x_script=script(status=400, error="openai")) as answer:
        assert await answer.json() == {"error": {"message": "scripted 400", "type": "t", "param": None, "code": "c"}}
    await fleet.gateway.counted(line, before + 1)


@pytest.mark.parametrize(("shape", "message"), [("detail", "messages: Field required"), ("html", "<h1>no</h1>")])
async def test_other_shapes_become_an_envelope(fleet: Fleet, shape: str, message: str) -> None:
    async with fleet.gateway.post(CHAT, chat(), x_script=script(status=422, error=shape)) as answer:
        assert answer.status == 422
        assert answer.content_type == "application/json"
        assert envelope_in(await answer.text())["message"] == message


async def test_without_a_usable_instance_it_is_503_with_retry_after(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, instances=[{"id": "a", "url": "http://127.0.0.1:9"}]) as gateway:
        async with gateway.post(CHAT, chat()) as answer:
            assert answer.status == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert envelope_in(await answer.text())["code"] == "no_instance"
        async with gateway.get("/readyz") as answer:
            assert answer.status == 503
            reasons = [each["reason"] for each in (await answer.json())["instances"].values()]
            assert reasons == ["can't be reached: Connection refused"]  # anybody may ask: no address
        async with gateway.get("/health") as answer:
            assert (answer.status, await answer.read()) == (503, b"")
        async with gateway.get("/healthz") as answer:
            assert answer.status == 200


async def test_with_a_usable_instance_it_is_healthy_and_says_its_version(fleet: Fleet) -> None:
    async with fleet.gateway.get("/health") as answer:
        assert (answer.status, await answer.read()) == (200, b"")
    async with fleet.gateway.get("/version") as answer:
        assert await answer.json() == {"version": installed_version()}


@pytest.mark.parametrize("path", ["/v1/v1/chat/completions", "//v1/chat/completions", "/v1//chat/completions"])
async def test_a_wrong_base_url_is_named(fleet: Fleet, path: str) -> None:
    async with fleet.gateway.session.post(URL(fleet.gateway.url + path, encoded=True), json=chat()) as answer:
        assert answer.status == 404
        message = envelope_in(await answer.text())["message"]
    assert "did you mean /v1/chat/completions?" in message
    assert "base URL" in message


async def test_with_keys_configured_only_they_are_accepted(tmp_path: Path) -> None:
    keys = [{"key": "sk-one", "tenant": "acme"}]
    async with running_fleet(tmp_path, api_keys=keys) as fleet:
        for header in (None, "Bearer sk-two", "sk-one", "Basic sk-one", "Bearer "):
            headers = {} if header is None else {"authorization": header}
            for method, path in (("POST", CHAT), ("GET", "/v1/models")):
                async with fleet.gateway.session.request(
                    method, fleet.gateway.url + path, headers=headers, json=chat()
                ) as answer:
                    assert answer.status == 401
                    assert answer.headers["www-authenticate"] == "Bearer"
                    envelope_in(await answer.text())
        async with fleet.gateway.post(CHAT, chat(), authorization="bearer sk-one") as answer:
            assert answer.status == 200


async def test_a_connection_that_sends_nonsense_does_no_harm(fleet: Fleet) -> None:
    host, port = fleet.gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"\x16\x03\x01nonsense\r\n\r\n")
    assert b"400" in await reader.read(100)
    writer.close()
    await writer.wait_closed()
    async with fleet.gateway.post(CHAT, chat()) as answer:
        assert answer.status == 200


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize("path", ["/v1/messages/batches", "/v1/messages/", "/v1/messages/count_tokens/x"])
async def test_unknown_routes_below_messages_answer_in_its_own_envelope(fleet: Fleet, path: str, method: str) -> None:
    async with fleet.gateway.session.request(method, fleet.gateway.url + path, json={}) as answer:
        assert answer.status == 404
        said = await answer.json()
    assert said["type"] == "error"
    assert said["error"]["type"] == "not_found_error"
    assert path in said["error"]["message"]


async def test_what_only_begins_like_messages_answers_in_openais(fleet: Fleet) -> None:
    for path in ("/v1/messagesx", "/v1/message", "/v1/nowhere"):
        async with fleet.gateway.get(path) as answer:
            assert answer.status == 404
            envelope_in(await answer.text())
