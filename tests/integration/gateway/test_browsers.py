"""Pages of other origins at a running gateway."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.fleet import CHAT, Fleet, chat, running_fleet

PAGE = "https://chat.example"
EVIL = "https://evil.example"
BODY = b'{"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}'

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with running_fleet(tmp_path_factory.mktemp("fleet"), cors_origins=[PAGE]) as running:
        yield running


def cors(headers: object) -> dict[str, str]:
    return {name.lower(): value for name, value in dict(headers).items() if name.lower().startswith("access-control-")}  # type: ignore[call-overload]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engines_own_permission_reaches_nobody(fleet: Fleet, *, stream: bool) -> None:
    for headers in ({}, {"origin": EVIL}):
        async with fleet.gateway.post(CHAT, chat(stream=stream), **headers) as answer:
            assert answer.status == 200
            assert cors(answer.headers) == {}


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
@pytest.mark.parametrize("path", [CHAT, "/generate", "/tokenize", "/v1/messages"])
async def test_what_any_page_could_send_without_asking_reaches_no_engine(fleet: Fleet, kind: str, path: str) -> None:
    before = fleet.requests
    async with fleet.gateway.post(path, BODY, origin=EVIL, content_type=kind) as answer:
        assert answer.status == 415
        assert cors(answer.headers) == {}
        said = await answer.json()
    assert said.get("type") == ("error" if path == "/v1/messages" else None)
    assert fleet.requests == before


@pytest.mark.parametrize("path", ["/v1/models", "/dashboard", "/metrics", "/dashboard/fleet", "/admin/v1/tenants"])
async def test_a_name_bound_to_loopback_reads_nothing(fleet: Fleet, path: str) -> None:
    async with fleet.gateway.get(path, host="evil.example:8000") as answer:
        assert answer.status == 403
        assert (await answer.json())["error"]["code"] == "host_not_allowed"


async def test_a_listed_page_is_allowed_whole_streams_and_errors(fleet: Fleet) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with fleet.gateway.session.options(fleet.gateway.url + CHAT, headers={"origin": PAGE, **asked}) as answer:
        assert answer.status == 204
        assert "content-length" not in answer.headers
        assert answer.headers["access-control-allow-origin"] == PAGE
    for body, status in ((chat(), 200), (chat(stream=True), 200), (chat(model="nobody"), 404), (b"{", 400)):
        async with fleet.gateway.post(CHAT, body, origin=PAGE) as answer:
            assert answer.status == status
            assert answer.headers.getall("access-control-allow-origin") == [PAGE]
            assert "origin" in answer.headers["vary"]


async def test_other_pages_are_refused_their_preflight(fleet: Fleet) -> None:
    headers = {"origin": EVIL, "access-control-request-method": "POST"}
    async with fleet.gateway.session.options(fleet.gateway.url + CHAT, headers=headers) as answer:
        assert answer.status == 403
        assert cors(answer.headers) == {}
    for path in ("/dashboard/fleet", "/admin/v1/tenants"):
        async with fleet.gateway.session.options(
            fleet.gateway.url + path, headers=headers | {"origin": PAGE}
        ) as answer:
            assert answer.status == 405
            assert cors(answer.headers) == {}


async def test_with_keys_any_name_is_served(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, api_keys=[{"key": "sk-1", "tenant": "acme"}]) as fleet:
        headers = {"authorization": "Bearer sk-1", "host": "llm.example"}
        async with fleet.gateway.post(CHAT, chat(), **headers) as answer:
            assert answer.status == 200
