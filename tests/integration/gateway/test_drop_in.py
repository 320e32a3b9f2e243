"""What clients of other servers expect to find: the interface as a page, and routes that only some engines have."""

import json
from pathlib import Path

import pytest
from aiohttp import web

from gateway.requests.paths import PATHS
from tests.support.fleet import CHAT, chat, running_fleet
from tests.support.running_gateway import running_gateway
from tests.support.scripted_engine import MODEL, ScriptedEngine
from tests.support.serving import serving

RERANK = {"model": MODEL, "query": "cats", "documents": ["a cat", {"text": "a dog"}]}
EMBED = {"model": MODEL, "input": ["a cat", "a dog"]}


async def test_the_interface_is_described_as_a_page_and_as_openapi_with_all_routes(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        async with gateway.get("/docs") as answer:
            page = await answer.text()
            assert (answer.status, answer.content_type) == (200, "text/html")
            assert "script" not in answer.headers["content-security-policy"]
        async with gateway.get("/openapi.json") as answer:
            paths = (await answer.json())["paths"]
    assert paths.keys() >= {*PATHS.values(), "/v1/models", "/admin/v1/keys", "/healthz"}
    assert [path for path in paths if f"<code>{path}</code>" not in page] == []
    assert all(item["summary"] for path in PATHS.values() for item in paths[path].values())
    names = [each["operationId"] for item in paths.values() for each in item.values()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("path", "body"), [("/v1/rerank", RERANK), ("/v1/embeddings", EMBED)])
async def test_an_engine_without_the_route_is_named_in_a_400(
    tmp_path: Path, path: str, body: dict[str, object]
) -> None:
    async with running_fleet(tmp_path, {"a": ScriptedEngine()}) as fleet:
        for _ in range(8):
            async with fleet.gateway.post(path, body) as answer:
                error = (await answer.json())["error"]
                assert (answer.status, error["code"]) == (400, "unsupported_route")
                assert error["message"].startswith(f"instance a has no route for {path[4:]}: ")
        async with fleet.gateway.post(CHAT, chat()) as answer:
            assert answer.status == 200, "its circuit breaker counts none of them"


async def test_an_unknown_model_of_the_engine_stays_a_404(tmp_path: Path) -> None:
    async def unknown(request: web.Request) -> web.Response:
        del request
        error = {"message": "The model `x` does not exist.", "type": "invalid_request_error", "code": "model_not_found"}
        return web.json_response({"error": error}, status=404)

    async with (
        serving(_engine(unknown)) as url,
        running_gateway(tmp_path, instances=_named(url)) as gateway,
        gateway.post("/v1/rerank", RERANK) as answer,
    ):
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "model_not_found")


async def test_documents_are_reranked_by_an_engine_that_does_it(tmp_path: Path) -> None:
    bodies = []

    async def rerank(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        results = [{"index": 1, "relevance_score": 0.9}, {"index": 0, "relevance_score": 0.1}]
        return web.json_response({"model": MODEL, "results": results, "usage": {"total_tokens": 9}})

    async with (
        serving(_engine(rerank)) as url,
        running_gateway(tmp_path, instances=_named(url)) as gateway,
        gateway.post("/v1/rerank", RERANK) as answer,
    ):
        assert (answer.status, answer.headers["x-kvgate-instance"]) == (200, "a")
        assert [each["index"] for each in (await answer.json())["results"]] == [1, 0]
    assert bodies == [RERANK]


@pytest.mark.parametrize(
    ("changed", "param"),
    [({"query": 1}, "query"), ({"documents": []}, "documents"), ({"documents": ["x"] * 2049}, "documents")],
)
async def test_what_cannot_be_reranked_is_named(tmp_path: Path, changed: dict[str, object], param: str) -> None:
    async with (
        running_gateway(tmp_path) as gateway,
        gateway.session.post(gateway.url + "/v1/rerank", data=json.dumps(RERANK | changed)) as answer,
    ):
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, param)


def _engine(handler: object) -> web.Application:
    async def models(request: web.Request) -> web.Response:
        del request
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/rerank", handler)  # type: ignore[arg-type]
    return app


def _named(url: str) -> list[dict[str, str]]:
    return [{"id": "a", "url": url}]
