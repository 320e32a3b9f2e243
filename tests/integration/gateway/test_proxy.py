"""The gateway in front of two scripted engines: what goes through, and how."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.running_gateway import RunningGateway, running_gateway
from tests.support.scripted_engine import MODEL, ScriptedEngine

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class Fleet(NamedTuple):
    gateway: RunningGateway
    engines: dict[str, ScriptedEngine]


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with ScriptedEngine().started() as a, ScriptedEngine().started() as b:
        instances = [{"id": "a", "url": a.url}, {"id": "b", "url": b.url}]
        async with running_gateway(tmp_path, instances=instances) as gateway:
            await gateway.usable(2)
            yield Fleet(gateway, {"a": a, "b": b})


def chat(**more: object) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **more}


async def test_a_chat_answer_comes_through_with_the_headers_of_the_route(fleet: Fleet) -> None:
    async with fleet.gateway.post(CHAT, chat()) as answer:
        assert answer.status == 200
        assert (await answer.json())["choices"][0]["message"]["content"] == "tok0tok1tok2tok3"
        assert answer.headers["x-kvgate-instance"] in {"a", "b"}
        assert answer.headers["x-kvgate-matched-tokens"] == "0"
        assert answer.headers["x-kvgate-route"] == "load;matched=0;reason=no_tokenizer"
        assert answer.headers["x-request-id"]
        assert answer.headers["x-engine-note"] == "kept"
