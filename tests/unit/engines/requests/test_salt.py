"""The salt's header at the edge: what is let through, what is refused, and that it never leaks between requests."""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import pytest

from engines.requests.headers import HeaderMiddleware
from engines.requests.salt import SALT, CacheSaltError, salt_of_headers

HEADER = b"x-kvgate-cache-salt"


@pytest.mark.parametrize("salt", ["a", "0123456789abcdef" * 4, "!~", "tenant:acme/1"])
def test_a_printable_salt_is_taken_as_it_is(salt: str) -> None:
    assert salt_of_headers([(b"host", b"h"), (HEADER, salt.encode())]) == salt


def test_a_request_without_the_header_is_unsalted() -> None:
    assert salt_of_headers([(b"host", b"h"), (b"x-kvgate-cache-salt2", b"a")]) == ""


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ([b""], "is 0 bytes long; 1 to 64 are allowed"),
        ([b"a" * 65], "is 65 bytes long; 1 to 64 are allowed"),
        ([b"a b"], "not a printable ASCII character"),
        ([b"a\x00"], "not a printable ASCII character"),
        ([b"caf\xc3\xa9"], "not a printable ASCII character"),
        ([b"a", b"a"], "is given 2 times"),
    ],
)
def test_a_bad_salt_is_refused_without_repeating_it(values: list[bytes], why: str) -> None:
    with pytest.raises(CacheSaltError, match=why):
        salt_of_headers([(HEADER, value) for value in values])


class Sent(list[MutableMapping[str, Any]]):
    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        self.append(message)


async def _nothing() -> MutableMapping[str, Any]:
    return {"type": "http.disconnect"}


def _scope(*salts: bytes) -> dict[str, Any]:
    return {"type": "http", "path": "/v1/chat/completions", "headers": [(HEADER, salt) for salt in salts]}


async def test_a_bad_salt_is_answered_400_in_openais_envelope() -> None:
    async def never(*_: object) -> None:
        raise AssertionError("the request was let through")

    sent = Sent()
    await HeaderMiddleware(never, SALT)(_scope(b"hush hush"), _nothing, sent)
    assert sent[0]["status"] == 400
    error = json.loads(sent[1]["body"])["error"]
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error",
        "x-kvgate-cache-salt",
        "invalid_cache_salt",
    )
    assert "hush" not in error["message"]


async def test_concurrent_requests_see_each_their_own_salt_and_none_remains() -> None:
    seen: dict[str, str] = {}

    async def app(
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ) -> None:
        del receive, send
        await asyncio.sleep(0)
        salt = salt_of_headers(scope["headers"])
        await asyncio.sleep(0)
        seen[salt] = SALT.current

    middleware = HeaderMiddleware(app, SALT)
    await asyncio.gather(
        middleware(_scope(b"acme"), _nothing, Sent()),
        middleware(_scope(), _nothing, Sent()),
        middleware(_scope(b"umbra"), _nothing, Sent()),
    )
    await middleware(_scope(b"last"), _nothing, Sent())
    assert seen == {"acme": "acme", "": "", "umbra": "umbra", "last": "last"}
    assert SALT.current == ""
