"""Bodies and paths that mean the admin API no good: each is refused in the envelope, and changes nothing."""

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.admin import ADMIN_KEY, Admin
from tests.support.fleet import Fleet, running_fleet

DEEP = 100_000
HOSTILE: dict[str, bytes] = {
    "lists nested deeply": b'{"note":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "objects nested deeply": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "an endless number": b'{"requests_per_min":' + b"9" * 100_000 + b"}",
    "an infinite number": b'{"weight": 1e999, "load_deadline_s": 1e999, "ttl_s": 1e999}',
    "no number": b'{"weight": NaN, "load_deadline_s": NaN, "ttl_s": NaN}',
    "half a surrogate pair": b'{"note": "\\ud800", "summary": "\\ud800", "url": "http://\\ud800"}',
    "a key that is half a pair": b'{"\\ud800": 1}',
    "no UTF-8": b'{"note": "\xff"}',
    "a null byte": b'{"note": "\\u0000", "url": "http://127.0.0.1:1\\u0000"}',
    "line breaks": b'{"note": "a\\r\\nset-cookie: x", "url": "http://127.0.0.1:1\\r\\nx: y"}',
    "a key twice": b'{"suspended": false, "suspended": "yes"}',
    "no object": b"[1, 2]",
    "half of one": b'{"note": ',
    "nothing": b"",
}
ROUTES = [
    ("PUT", "/tenants/acme"),
    ("PUT", "/quotas/acme"),
    ("PUT", "/presets/mine"),
    ("PUT", "/presets/current"),
    ("PUT", "/instances/x/lease"),
    ("POST", "/instances"),
    ("POST", "/keys"),
    ("POST", "/explain"),
    ("PUT", "/policies/eviction"),
    ("POST", "/prefix-cache/reset"),
]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """One for all tests: nothing is changed in any."""
    async with running_fleet(tmp_path_factory.mktemp("fleet"), admin_key=ADMIN_KEY) as running:
        yield running


async def test_hostile_bodies_are_refused_and_change_nothing(fleet: Fleet) -> None:
    key = {"authorization": f"Bearer {ADMIN_KEY}", "content-type": "application/json"}
    wrong: list[str] = []
    for name, body in HOSTILE.items():
        for method, path in ROUTES:
            url = f"{fleet.gateway.url}/admin/v1{path}"
            async with fleet.gateway.session.request(method, url, data=body, headers=key) as answer:
                text = await answer.text()
            if answer.status == 200 and path == "/prefix-cache/reset":
                continue  # it needs no body
            if not 400 <= answer.status < 500 or not json.loads(text)["error"]["message"]:
                wrong.append(f"{method} {path}, {name}: {answer.status} {text[:200]}")
    assert wrong == []
    assert [each["action"] for each in (await Admin(fleet.gateway).ok("GET", "/audit"))["data"]] == []


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("PUT", "/policies/eviction", '{"name": "s3fifo", "params": {"small": %s}}', "params.small"),
        ("PUT", "/quotas/acme", '{"weight": %s}', "weight"),
        ("PUT", "/quotas/acme", '{"kv": {"DDR": {"weight": %s}}}', "kv.DDR.weight"),
        ("PUT", "/routing", '{"policy": "round_robin", "spread": %s}', "spread"),
        ("PUT", "/presets/mine", '{"summary": "ours", "context_tokens": %s}', "context_tokens"),
        ("PUT", "/instances/x/lease", '{"url": "http://127.0.0.1:1", "ttl_s": %s}', "ttl_s"),
        ("POST", "/keys", '{"tenant": "acme", "expires_in_s": %s}', "expires_in_s"),
        ("POST", "/prefixes", '{"model": "scripted", "messages": [{"content": %s}]}', "messages.0.content"),
    ],
)
async def test_a_number_that_is_not_finite_is_refused_by_its_name(  # noqa: PLR0913, PLR0917 - a table
    fleet: Fleet, method: str, path: str, body: str, param: str, number: str
) -> None:
    key = {"authorization": f"Bearer {ADMIN_KEY}", "content-type": "application/json"}
    url = f"{fleet.gateway.url}/admin/v1{path}"
    async with fleet.gateway.session.request(method, url, data=body % number, headers=key) as answer:
        error = json.loads(await answer.text(), parse_constant=pytest.fail)["error"]
    assert (answer.status, error["param"]) == (400, param)
    assert error["message"].startswith(f"{param} is no finite number; allowed are finite numbers")


@pytest.mark.parametrize("name", ["..%2Ftenants", "a%0d%0aset-cookie:x", "a%00", "%ff", "a" * 65, "-a", "é"])
async def test_odd_names_are_refused_and_not_echoed_into_headers(fleet: Fleet, name: str) -> None:
    admin = Admin(fleet.gateway)
    for path in ("/tenants", "/quotas", "/presets", "/instances"):
        status, headers, said = await admin.call("PUT", f"{path}/{name}", {})
        assert 400 <= status < 500, (path, status)
        assert said["error"]["message"]
        assert "set-cookie" not in headers
