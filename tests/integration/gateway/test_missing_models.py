"""A model that can't be served now is a 503 everywhere; one that does not exist is a 404 everywhere."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet import CHAT, chat, instances, running_fleet
from tests.support.running_gateway import RunningGateway, eventually, running_gateway
from tests.support.scripted_engine import MODEL, ScriptedEngine

ASKED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": "x"}]}),
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/embeddings", {"input": "x"}),
    ("/v1/responses", {"input": "x"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]}),
    ("/generate", {"prompt": "x"}),
    ("/tokenize", {"prompt": "x"}),
]


async def answers(gateway: RunningGateway, model: str) -> set[tuple[int, bool]]:
    """The status of every route that takes a model, and whether Retry-After is there."""
    found = set()
    for path, body in ASKED:
        async with gateway.post(path, {"model": model, **body}) as answer:
            found.add((answer.status, "retry-after" in answer.headers))
    async with gateway.get(f"/v1/models/{model}") as answer:
        found.add((answer.status, "retry-after" in answer.headers))
    return found


async def test_a_model_whose_only_instance_is_down_when_the_gateway_starts_is_unavailable_everywhere(
    tmp_path: Path,
) -> None:
    engines = {"a": ScriptedEngine(), "b": ScriptedEngine(model="other")}
    async with engines["a"].started():
        async with engines["b"].started():
            pass
        async with running_gateway(tmp_path, instances=instances(engines)) as gateway:
            await gateway.usable(1)
            assert await answers(gateway, "other") == {(503, True)}
            async with gateway.post(CHAT, chat()) as answer:
                assert answer.status == 200


@pytest.mark.parametrize(("memory_s", "expected"), [(600, (503, True)), (0, (404, False))])
async def test_a_model_whose_instance_has_left_is_unavailable_for_as_long_as_the_setting_says(
    tmp_path: Path, memory_s: float, expected: tuple[int, bool]
) -> None:
    key = "0123456789abcdef"
    async with running_fleet(tmp_path, admin_key=key, model_memory_s=memory_s) as fleet:
        other = ScriptedEngine(model="other")
        async with other.started():
            admin = {"authorization": f"Bearer {key}"}
            body = {"id": "c", "url": other.url}
            async with fleet.gateway.post("/admin/v1/instances", body, **admin) as answer:
                assert answer.status == 201
            await fleet.gateway.usable(3)
            async with fleet.gateway.session.delete(
                fleet.gateway.url + "/admin/v1/instances/c", headers=admin
            ) as answer:
                assert answer.status < 300
            await fleet.gateway.usable(2)
            await eventually(lambda: _gone(fleet.gateway, admin))
            assert await answers(fleet.gateway, "other") == {expected}
            assert await answers(fleet.gateway, "never") == {(404, False)}


async def _gone(gateway: RunningGateway, admin: dict[str, str]) -> bool:
    async with gateway.get("/admin/v1/instances/c", **admin) as answer:
        return bool(answer.status == 404)


async def test_generate_without_a_model_while_nothing_is_usable_is_unavailable(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        for engine in fleet.engines.values():
            engine.healthy = False
        await fleet.gateway.usable(0)
        for path, body in (("/generate", {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
            async with fleet.gateway.post(path, body) as answer:
                said = await answer.json()
                assert answer.status == 503
                assert "retry-after" in answer.headers
                assert "''" not in said["error"]["message"]
        async with fleet.gateway.get(f"/v1/models/{MODEL}") as answer:
            assert answer.status == 503
