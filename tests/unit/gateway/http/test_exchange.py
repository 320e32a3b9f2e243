"""What an exchange holds of a request's body."""

import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.http.exchange import Exchange

MANY = 200_000


def exchange_of(parts: Sequence[bytes]) -> Exchange:
    """One whose server passes on a body in these parts."""
    left = iter(parts)
    count = 0

    async def receive() -> dict[str, Any]:
        nonlocal count
        count += 1
        return {"type": "http.request", "body": next(left), "more_body": count < len(parts)}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    return Exchange(scope, receive, send, send_timeout_s=1.0)


@pytest.mark.parametrize("parts", [[b"whole"], [b"", b"a", b"", b"b"], [b"a", b""], [b""]])
async def test_a_body_is_its_parts_one_after_the_other(parts: list[bytes]) -> None:
    taken: list[int] = []
    body = await exchange_of(parts).read_body(limit_bytes=100, timeout_s=30.0, take=taken.append)
    assert body == b"".join(parts)
    assert sum(taken) == len(body)


async def test_a_body_in_tiny_parts_takes_no_more_memory_than_one_in_large_ones() -> None:
    exchange = exchange_of([b"ab"] * MANY)
    tracemalloc.start()
    try:
        body = await exchange.read_body(limit_bytes=2 * MANY, timeout_s=60.0, take=lambda _: None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(body) == 2 * MANY
    assert peak < 4 * len(body)
