"""What goes through the gateway, and how: bodies, headers, streams, usage, sizes."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from yarl import URL

from tests.support.fleet import CHAT, COMPLETIONS, Fleet, chat, running_fleet, script
from tests.support.running_gateway import eventually
from tests.support.scripted_engine import MODEL, Script, ScriptedEngine, events

USAGE = {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11, "prompt_tokens_details": {"cached_tokens": 0}}
TOKENS = {"kvgate_prompt_tokens_total": 7, "kvgate_completion_tokens_total": 4}
"""What one answer adds."""


pytestmark = pytest.mark.asyncio(loop_scope="module")  # one for all that share a gateway


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with running_fleet(tmp_path) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """One engine for all tests that look at what it was sent last, or at what comes back."""
    async with running_fleet(tmp_path_factory.mktemp("one"), {"a": ScriptedEngine()}) as running:
        yield running


async def test_a_chat_answer_comes_through_with_the_headers_of_the_route(fleet: Fleet) -> None:
    async with fleet.gateway.post(CHAT, chat()) as answer:
        assert answer.status == 200
        assert (await answer.json())["choices"][0]["message"]["content"] == "tok0tok1tok2tok3"
        assert answer.headers["x-kvgate-instance"] in {"a", "b"}
        assert answer.headers["x-kvgate-matched-tokens"] == "0"
        assert answer.headers["x-kvgate-route"] == "load;matched=0;reason=no_tokenizer"
        assert answer.headers["x-request-id"]
        assert answer.headers["x-engine-note"] == "kept"


async def test_the_body_reaches_the_engine_byte_for_byte(fleet: Fleet) -> None:
    body = b'{ "model":"scripted",\n"messages":[{"role":"user","content":"\xe4\xbd\xa0"}] ,"vendor":[1.50,null]}'
    async with fleet.gateway.post(CHAT, body) as answer:
        assert answer.status == 200
    assert fleet.last_body() == body


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/messages"])
@pytest.mark.parametrize("query", ["", "?", "?beta=true", "?a=%0d%0ax-evil:%201&b=%20+;/?&&a=1&=%ff", "?model=other"])
async def test_the_query_reaches_the_engine_byte_for_byte(one: Fleet, path: str, query: str) -> None:
    body = json.dumps(chat(prompt="hi", max_tokens=4)).encode()
    url = URL(one.gateway.url + path + query, encoded=True)
    before = one.requests
    async with one.gateway.session.post(url, data=body) as answer:
        assert answer.status == 200
    assert one.requests == before + 1
    assert one.engines["a"].targets[-1] == path + query.removesuffix("?")
    assert "x-evil" not in one.last_headers()


async def test_end_to_end_headers_reach_the_engine_and_our_own_and_hop_by_hop_ones_never(fleet: Fleet) -> None:
    sent = {
        "Authorization": "Bearer sk-secret",
        "traceparent": "00-1-2-03",
        "X-Session-ID": "s1",
        "x-request-id": "req-7",
        "user-agent": "mine/1",
        "x-kvgate-cache-salt": "stolen",
        "x-kvgate-priority": "high",
        "X-Kvgate-Deadline-Ms": "1",
        "X-KVGATE-Instance": "b",
        "Connection": "keep-alive, x-hop",
        "x-hop": "1",
        "te": "trailers",
        "x-utf8": "grün",
    }
    async with fleet.gateway.session.post(fleet.gateway.url + CHAT, json=chat(), headers=sent) as answer:
        assert answer.headers["x-request-id"] == "req-7"
    got = fleet.last_headers()
    assert got["traceparent"] == "00-1-2-03"
    assert got["x-session-id"] == "s1"
    assert got["x-request-id"] == "req-7"
    assert got["user-agent"] == "mine/1"
    assert got["content-type"] == "application/json"
    assert got["x-utf8"] == "grün"
    assert not {"authorization", "x-hop", "te", "x-kvgate-instance", "transfer-encoding"} & set(got)
    assert got["x-kvgate-cache-salt"] != "stolen"
    assert len(got["x-kvgate-cache-salt"]) == 32
    assert got["x-kvgate-priority"] == "normal"
    assert int(got["x-kvgate-deadline-ms"]) > 1


async def test_an_insane_request_id_is_replaced(fleet: Fleet) -> None:
    async with fleet.gateway.session.post(
        fleet.gateway.url + CHAT, json=chat(), headers={"x-request-id": "a b\tc" + "x" * 300}
    ) as answer:
        assert len(answer.headers["x-request-id"]) == 32


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"split": 7, "text": "中文字符"},
        {"crlf": True, "split": 7},
        {"no_space": True, "split": 3},
        {"crlf": True, "text": "é\\n"},
    ],
)
async def test_a_stream_with_usage_comes_through_byte_for_byte(one: Fleet, path: str, how: dict[str, object]) -> None:
    said = chat(stream=True, stream_options={"include_usage": True}, prompt="x")
    async with one.gateway.post(path, said, x_script=script(**how)) as answer:
        assert answer.content_type == "text/event-stream"
        got = await answer.read()
    assert got == b"".join(events(path, MODEL, said, Script(**how), USAGE))  # type: ignore[arg-type]
    assert json.loads(one.last_body()) == said


@pytest.mark.parametrize("options", ["absent", None, {}, {"include_usage": False, "x": 1.50}])
@pytest.mark.parametrize("split", [None, 7])
async def test_usage_that_the_client_did_not_ask_for_is_accounted_and_hidden(
    one: Fleet, options: object, split: int | None
) -> None:
    said = chat(stream=True) if options == "absent" else chat(stream=True, stream_options=options)
    before = {line: await one.gateway.metric(line) for line in TOKENS}
    async with one.gateway.post(CHAT, said, x_script=script(split=split)) as answer:
        got = (await answer.read()).decode()
    sent = json.loads(one.last_body())
    assert sent.pop("stream_options")["include_usage"] is True
    said.pop("stream_options", None)
    assert sent == said
    chunks = [json.loads(line[6:]) for line in got.splitlines() if line.startswith("data: {")]
    assert len(chunks) == 4
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)
    assert got.endswith("data: [DONE]\n\n")
    await eventually(lambda: one.active == 0)
    for line, tokens in TOKENS.items():
        await one.gateway.counted(line, before[line] + tokens)


async def test_usage_of_a_whole_answer_is_accounted(fleet: Fleet) -> None:
    async with fleet.gateway.post(CHAT, chat()) as answer:
        assert (await answer.json())["usage"] == USAGE
    await fleet.gateway.counted("kvgate_prompt_tokens_total", 7)
    line = 'kvgate_requests_total{operation="chat_completions",outcome="ok"}'
    await fleet.gateway.counted(line, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_compressing_engine_is_readable_and_its_headers_are_consistent(one: Fleet, *, stream: bool) -> None:
    line = "kvgate_completion_tokens_total"
    before = await one.gateway.metric(line)
    async with one.gateway.post(CHAT, chat(stream=stream), x_script=script(gzip=True)) as answer:
        data = await answer.read()
        if answer.headers.get("content-encoding") == "gzip":
            data = gzip.decompress(data)
        assert b"tok3" in data
        assert answer.headers.get("content-length", str(len(data))) == str(len(data))
    assert one.last_headers().get("accept-encoding", "identity") == "identity"
    await one.gateway.counted(line, before + TOKENS[line])


@pytest.mark.parametrize(
    ("stream", "how", "expected"),
    [
        (False, {}, "application/json"),
        (True, {}, "text/event-stream"),
        (True, {"status": 500}, "application/json"),
        (False, {"status": 429}, "application/json"),
    ],
)
async def test_the_media_type_is_that_of_the_answer(
    one: Fleet, *, stream: bool, how: dict[str, object], expected: str
) -> None:
    async with one.gateway.post(CHAT, chat(stream=stream), x_script=script(**how)) as answer:
        await answer.read()
        assert answer.content_type == expected


async def test_three_hundred_slow_requests_run_at_once(fleet: Fleet) -> None:
    async def one() -> int:
        async with fleet.gateway.post(CHAT, chat(), x_script=script(ttft_s=5)) as answer:
            await answer.read()
            return int(answer.status)

    tasks = [asyncio.create_task(one()) for _ in range(300)]
    await eventually(lambda: fleet.active == 300)
    assert await asyncio.gather(*tasks) == [200] * 300
    per_engine = [len(engine.requests) for engine in fleet.engines.values()]
    assert min(per_engine) > 100


@pytest.mark.parametrize("size_mib", [1, 31])
async def test_a_large_body_goes_through(one: Fleet, size_mib: int) -> None:
    body = json.dumps({"model": MODEL, "prompt": "x", "more": "x" * (size_mib << 20)}).encode()
    async with one.gateway.post(COMPLETIONS, body) as answer:
        assert answer.status == 200
    assert one.last_body() == body


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_bound_is_refused_and_never_reaches_an_engine(tmp_path: Path, *, declared: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b"x" * 1024

    async with running_fleet(tmp_path, max_body_bytes=32 << 10) as fleet:
        body = b"x" * (64 << 10) if declared else pieces()
        async with fleet.gateway.session.post(fleet.gateway.url + CHAT, data=body) as answer:
            assert answer.status == 413
            assert (await answer.json())["error"]["code"] == "request_too_large"
        assert fleet.requests == 0


async def test_a_body_that_never_ends_is_given_up(tmp_path: Path) -> None:
    async def forever() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(3600)

    async with (
        running_fleet(tmp_path, body_timeout_s=0.2) as fleet,
        fleet.gateway.session.post(fleet.gateway.url + CHAT, data=forever()) as answer,
    ):
        assert answer.status == 408


async def test_models_are_the_union_with_unique_ids_and_all_fields(tmp_path: Path) -> None:
    engines = {"a": ScriptedEngine(), "b": ScriptedEngine(), "c": ScriptedEngine(model="other")}
    engines["b"].extra_card = {"root": "scripted-root"}
    async with running_fleet(tmp_path, engines) as fleet:
        async with fleet.gateway.get("/v1/models") as answer:
            listed = await answer.json()
        assert listed["object"] == "list"
        cards = {card["id"]: card for card in listed["data"]}
        assert len(listed["data"]) == len(cards) == 2
        assert cards[MODEL]["max_model_len"] == 8192
        assert cards[MODEL]["root"] == "scripted-root"
        async with fleet.gateway.get("/v1/models/other") as answer:
            assert (await answer.json())["id"] == "other"
        async with fleet.gateway.get("/v1/models/none") as answer:
            assert answer.status == 404
            assert (await answer.json())["error"]["code"] == "model_not_found"
        for _ in range(3):
            async with fleet.gateway.post(CHAT, chat(model="other")) as answer:
                assert answer.headers["x-kvgate-instance"] == "c"


async def test_labels_stay_bounded_whatever_clients_send(fleet: Fleet) -> None:
    async def series() -> int:
        async with fleet.gateway.get("/metrics") as answer:
            return len((await answer.text()).splitlines())

    async def noise(start: int) -> None:
        for number in range(start, start + 100):
            async with fleet.gateway.post(CHAT, chat(model=f"model-{number}"), authorization=f"Bearer k{number}"):
                pass
            async with fleet.gateway.get(f"/v1/path-{number}"), fleet.gateway.get(f"/path-{number}"):
                pass

    await noise(0)
    before = await series()
    await noise(100)
    assert await series() == before


async def test_ops_routes_say_how_it_is(fleet: Fleet) -> None:
    async with fleet.gateway.get("/healthz") as answer:
        assert answer.status == 200
    async with fleet.gateway.get("/readyz") as answer:
        said = await answer.json()
        assert answer.status == 200
        assert said["usable"] == 2
        assert said["instances"]["a"]["state"] == "healthy"
        assert said["instances"]["a"]["blocks"] == "known"
        assert said["blocks_known"] == 2
    for path in (
        "/healthz",
        "/readyz",
        "/metrics",
        "/dashboard",
        "/dashboard/fleet",
        "/v1/models",
        f"/v1/models/{MODEL}",
    ):
        async with fleet.gateway.get(path) as shown, fleet.gateway.session.head(fleet.gateway.url + path) as answer:
            assert answer.status == 200
            assert answer.content_type == shown.content_type
            assert int(answer.headers["content-length"]) > 0
            assert await answer.read() == b""
    async with fleet.gateway.session.head(fleet.gateway.url + CHAT) as answer:
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
    async with fleet.gateway.get("/metrics") as answer:
        text = await answer.text()
        assert 'kvgate_instance_state{instance="a",state="healthy"} 1.0' in text
        assert 'kvgate_requests_in_flight{instance="b"} 0.0' in text
