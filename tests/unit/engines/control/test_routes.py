"""The operators' routes: what a request says reaches its operation, and nothing without an end is read."""

from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from engines.control.operations import (
    BLOCKS,
    INVALIDATE,
    MIGRATE,
    PIN,
    PREFIXES,
    QUOTAS,
    RESET,
    SET_QUOTA,
    UNPIN,
)
from engines.control.routes import MAX_BODY_BYTES, mount_control
from kvcontrol.core.prefix_control import INVALIDATE_PATH, PIN_PATH, PREFIXES_PATH, UNPIN_PATH
from kvcontrol.core.tier_control import BLOCKS_PATH, MIGRATE_PATH, QUOTAS_PATH, RESET_PATH

Asked = list[tuple[bytes, bytes]]


@pytest.fixture
def asked() -> Asked:
    return []


@pytest.fixture
def client(asked: Asked) -> Iterator[TestClient]:
    async def answer(operation: bytes, body: bytes) -> bytes:
        asked.append((operation, body))
        return b"done"

    app = FastAPI()
    mount_control(app, answer)
    with TestClient(app) as client:
        yield client


def test_each_route_asks_for_its_operation_with_its_body(client: TestClient, asked: Asked) -> None:
    assert client.get(f"{BLOCKS_PATH}?tier=DDR&tenant=a&limit=07").text == "done"
    assert client.get(QUOTAS_PATH).text == "done"
    assert client.put(QUOTAS_PATH, content=b"quota").text == "done"
    assert client.post(MIGRATE_PATH, content=b"hashes").text == "done"
    assert client.post(RESET_PATH).text == "done"
    assert client.get(PREFIXES_PATH).text == "done"
    assert client.post(PIN_PATH, content=b"pin").text == "done"
    assert client.post(UNPIN_PATH, content=b"unpin").text == "done"
    assert client.post(INVALIDATE_PATH, content=b"invalidate").text == "done"
    assert asked == [
        (BLOCKS, b'{"tier":"DDR","tenant":"a","limit":7}'),
        (QUOTAS, b""),
        (SET_QUOTA, b"quota"),
        (MIGRATE, b"hashes"),
        (RESET, b""),
        (PREFIXES, b""),
        (PIN, b"pin"),
        (UNPIN, b"unpin"),
        (INVALIDATE, b"invalidate"),
    ]


@pytest.mark.parametrize("limit", ["x", "-1", "1.5", "", "1e3", "²", "9" * 30, "9" * 5_000])
def test_a_limit_that_is_no_number_is_passed_on_to_be_refused(client: TestClient, asked: Asked, limit: str) -> None:
    client.get(BLOCKS_PATH, params={"limit": limit})
    [(operation, body)] = asked
    assert operation == BLOCKS
    assert f'"limit":"{limit}"'.encode() in body


def test_the_other_methods_are_refused(client: TestClient, asked: Asked) -> None:
    for path, allowed in ((BLOCKS_PATH, "GET"), (MIGRATE_PATH, "POST"), (RESET_PATH, "POST")):
        answer = client.delete(path)
        assert answer.status_code == 405
        assert answer.headers["allow"] == allowed
    assert client.post(QUOTAS_PATH).status_code == 405
    assert asked == []


@pytest.mark.parametrize("path", [MIGRATE_PATH, RESET_PATH])
def test_a_body_is_read_up_to_the_limit_and_no_further(client: TestClient, asked: Asked, path: str) -> None:
    assert client.post(path, content=b" " * MAX_BODY_BYTES).text == "done"
    answer = client.post(path, content=b" " * (MAX_BODY_BYTES + 1))
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        413,
        f"the body is longer than {MAX_BODY_BYTES} bytes",
    )
    assert [len(body) for _, body in asked] == [MAX_BODY_BYTES]
