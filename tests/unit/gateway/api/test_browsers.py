"""Which requests of pages pass, and what other origins are told."""

import socket
from typing import Any

import pytest

from gateway.api.browsers import Browsers, Hosts, hosts_of

EVIL = b"https://evil.example"
CHAT = b"https://chat.example:8443"


def scope(method: str = "POST", **headers: str) -> dict[str, Any]:
    named = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    return {"method": method, "headers": [(b"host", b"127.0.0.1:8000")] * ("host" not in headers) + named}


def browsers(*origins: str, keyless: bool = False) -> Browsers:
    return Browsers(origins, hosts=Hosts(hosts_of(origins)), keyless=lambda: keyless)


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.0.0.1:8000", "127.9.9.9", "[::1]", "[::1]:8000", "localhost", "LocalHost:80", "localhost."),
        *("my.localhost", "10.0.0.7:8000", "192.168.1.4", "", socket.gethostname()),
    ],
)
def test_addresses_and_names_of_this_machine_are_known(host: str) -> None:
    assert browsers(keyless=True).look(scope(host=host), shared=True) is None


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "notlocalhost"),
        *("x", "127.0.0.1evil", "[::1].evil", "0x7f.1", "evil.example."),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_a_name_that_is_not_this_machines_is_refused_where_no_key_is_asked_for(host: str, method: str) -> None:
    visit = browsers(keyless=True).look(scope(method, host=host), shared=True)
    assert visit is not None
    assert visit.refusal is not None
    assert (visit.refusal.status, visit.refusal.reason) == (403, "host_not_allowed")
    assert browsers().look(scope(method, host=host), shared=True) is None


def test_the_hosts_of_listed_origins_are_names_of_the_gateway() -> None:
    listed = browsers(CHAT.decode(), keyless=True)
    assert listed.look(scope(host="chat.example"), shared=True) is None
    assert listed.look(scope(host="evil.example"), shared=True) is not None


@pytest.mark.parametrize(
    ("kind", "taken"),
    [
        *((each, True) for each in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.x+json")),
        *((each, False) for each in (None, "", "text/plain", "text/plain;application/json", "multipart/form-data")),
        *((each, False) for each in ("application/x-www-form-urlencoded", "application/jsonp", "application/json,x")),
    ],
)
@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:8000"])
@pytest.mark.parametrize("body", [{"content_length": "2"}, {"transfer_encoding": "chunked"}])
def test_a_body_with_an_origin_is_json(kind: str | None, origin: str, body: dict[str, str], *, taken: bool) -> None:
    typed = {} if kind is None else {"content_type": kind}
    visit = browsers().look(scope(origin=origin, **typed, **body), shared=False)
    assert (visit is None) is taken
    if visit is not None:
        assert visit.refusal is not None
        assert (visit.refusal.status, visit.refusal.reason) == (415, "unsupported_media_type")


def test_requests_without_an_origin_or_without_a_body_are_of_any_type() -> None:
    assert browsers().look(scope(content_type="text/plain", content_length="2"), shared=True) is None
    assert browsers().look(scope(origin="https://evil.example", content_length="0"), shared=True) is None
    assert browsers().look(scope("DELETE", origin="https://evil.example"), shared=True) is None


def preflight(origin: bytes) -> dict[str, Any]:
    return scope(
        "OPTIONS",
        origin=origin.decode(),
        access_control_request_method="POST",
        access_control_request_headers="authorization,content-type",
    )


def test_a_listed_page_may_ask_on_the_shared_routes_alone() -> None:
    listed = browsers(CHAT.decode())
    visit = listed.look(preflight(CHAT), shared=True)
    assert visit is not None
    assert visit.preflight
    assert dict(visit.headers) == {
        b"access-control-allow-origin": CHAT,
        b"vary": b"origin",
        b"access-control-allow-methods": b"GET, POST",
        b"access-control-allow-headers": b"authorization,content-type",
        b"access-control-max-age": b"600",
    }
    assert listed.look(preflight(CHAT), shared=False) is None


@pytest.mark.parametrize("origin", [EVIL, b"null", b"https://chat.example", b"http://chat.example:8443", CHAT + b"."])
def test_pages_of_other_origins_get_no_preflight_and_no_header(origin: bytes) -> None:
    listed = browsers(CHAT.decode())
    visit = listed.look(preflight(origin), shared=True)
    assert visit is not None
    assert visit.refusal is not None
    assert (visit.refusal.status, visit.refusal.reason, visit.headers) == (403, "origin_not_allowed", ())
    assert listed.look(scope(origin=origin.decode(), content_type="application/json"), shared=True) is None


def test_all_origins_are_allowed_by_a_star() -> None:
    visit = browsers("*").look(scope(origin="https://any.example", content_type="application/json"), shared=True)
    assert visit is not None
    assert visit.refusal is None
    assert (b"access-control-allow-origin", b"*") in visit.headers


def test_odd_names_of_headers_are_not_echoed() -> None:
    asked = preflight(CHAT)
    asked["headers"][-1] = (b"access-control-request-headers", b"a, b\r\nx: y")
    visit = browsers(CHAT.decode()).look(asked, shared=True)
    assert visit is not None
    assert b"access-control-allow-headers" not in dict(visit.headers)
