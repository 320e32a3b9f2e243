"""The operators' part of ``/kv/v1`` on the api_server: bodies go to the engine process and come back as they are."""

from collections.abc import Awaitable, Callable

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from engines.lmdeploy.pin_operations import INVALIDATE, PIN, PREFIXES, UNPIN
from engines.lmdeploy.tier_operations import BLOCKS, MIGRATE, QUOTAS, RESET, SET_QUOTA
from kvcontrol.core.prefix_control import INVALIDATE_PATH, PIN_PATH, PREFIXES_PATH, UNPIN_PATH
from kvcontrol.core.tier_control import BLOCKS_PATH, MIGRATE_PATH, QUOTAS_PATH, RESET_PATH

MAX_BODY_BYTES = 1 << 20
_MOST_DIGITS = 18
"""Of a number that JSON can carry; a longer one goes on as the text that it is, to be refused."""

Answer = Callable[[bytes, bytes], Awaitable[Response]]
"""Answers an operation with a body."""


def mount_tier_routes(app: FastAPI, answer: Answer, too_large: Callable[[int], Response]) -> None:
    """Add the routes; ``too_large`` answers a body of more than ``MAX_BODY_BYTES``."""

    async def blocks(request: Request) -> Response:
        query: dict[str, object] = dict(request.query_params)
        if "limit" in query:
            query["limit"] = whole_number(request.query_params["limit"])
        return await answer(BLOCKS, msgspec.json.encode(query))

    def without_body(operation: bytes) -> Callable[[], Awaitable[Response]]:
        async def handle() -> Response:
            return await answer(operation, b"")

        return handle

    def with_body(operation: bytes) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            body = b""
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    return too_large(MAX_BODY_BYTES)
            return await answer(operation, body)

        return handle

    for path, method, handler in (
        (BLOCKS_PATH, "GET", blocks),
        (QUOTAS_PATH, "GET", without_body(QUOTAS)),
        (QUOTAS_PATH, "PUT", with_body(SET_QUOTA)),
        (MIGRATE_PATH, "POST", with_body(MIGRATE)),
        (RESET_PATH, "POST", with_body(RESET)),
        (PREFIXES_PATH, "GET", without_body(PREFIXES)),
        (PIN_PATH, "POST", with_body(PIN)),
        (UNPIN_PATH, "POST", with_body(UNPIN)),
        (INVALIDATE_PATH, "POST", with_body(INVALIDATE)),
    ):
        app.add_api_route(path, handler, methods=[method], response_model=None, tags=["kv"])


def whole_number(text: str) -> int | str:
    """Return the number that a query's text is, or the text, which the engine process refuses with what is allowed."""
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else text


__all__ = ["MAX_BODY_BYTES", "Answer", "mount_tier_routes", "whole_number"]
