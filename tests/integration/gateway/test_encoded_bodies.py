"""Clients that compress what they send."""

import gzip
import json
import zlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from backports import zstd

from tests.support.admin import ADMIN_KEY
from tests.support.fleet import CHAT, Fleet, chat, running_fleet

pytestmark = pytest.mark.asyncio(loop_scope="module")
ENCODERS = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstd.compress}
MOST = 1 << 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    settings = {"max_body_bytes": MOST, "admin_key": ADMIN_KEY}
    async with running_fleet(tmp_path_factory.mktemp("fleet"), **settings) as running:
        yield running


@pytest.mark.parametrize("coding", ENCODERS)
@pytest.mark.parametrize("padding", [0, 500_000], ids=["short", "long"])
async def test_the_engine_gets_what_the_body_holds(fleet: Fleet, coding: str, padding: int) -> None:
    body = json.dumps(chat(padding=[coding, *range(padding // 8)])).encode()
    async with fleet.gateway.post(CHAT, ENCODERS[coding](body), content_encoding=coding) as answer:
        assert answer.status == 200, await answer.text()
    (got,) = (
        (engine.bodies[-1], engine.headers[-1]) for engine in fleet.engines.values() if body in engine.bodies[-1:]
    )
    assert "content-encoding" not in got[1]
    assert got[1]["content-length"] == str(len(body))


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/tokenize"])
@pytest.mark.parametrize(
    ("coding", "body", "refusal"),
    [
        ("br", b"{}", (415, "unsupported_media_type")),
        ("gzip, gzip", gzip.compress(gzip.compress(b"{}")), (415, "unsupported_media_type")),
        ("gzip", b"{}", (400, "invalid_encoding")),
        ("zstd", zstd.compress(b"{}")[:-1], (400, "invalid_encoding")),
        ("gzip", gzip.compress(b" " * (MOST + 1)), (413, "request_too_large")),
        ("zstd", zstd.compress(b" " * (1 << 26)), (413, "request_too_large")),
    ],
    ids=["unknown", "twice", "damaged", "cut", "long", "bomb"],
)
async def test_what_can_not_be_decoded_is_refused_in_the_routes_envelope(
    fleet: Fleet, path: str, coding: str, body: bytes, refusal: tuple[int, str]
) -> None:
    before = fleet.requests
    async with fleet.gateway.post(path, body, content_encoding=coding) as answer:
        said = await answer.json()
    assert answer.status == refusal[0]
    if path == "/v1/messages":
        assert said["type"] == "error"
    else:
        assert said["error"]["code"] == refusal[1]
    assert fleet.requests == before


async def test_administrators_may_compress_as_well(fleet: Fleet) -> None:
    url = f"{fleet.gateway.url}/admin/v1/tenants/acme"
    headers = {"authorization": f"Bearer {ADMIN_KEY}", "content-type": "application/json"}
    for coding, encode in ENCODERS.items():
        sent = headers | {"content-encoding": coding}
        async with fleet.gateway.session.put(url, data=encode(b'{"note": "zipped"}'), headers=sent) as answer:
            assert answer.status in {200, 201}
            assert (await answer.json())["note"] == "zipped"
        async with fleet.gateway.session.put(url, data=encode(b" " * (1 << 22)), headers=sent) as answer:
            assert answer.status == 413
    async with fleet.gateway.session.put(url, data=b"{}", headers=headers | {"content-encoding": "br"}) as answer:
        assert answer.status == 415
