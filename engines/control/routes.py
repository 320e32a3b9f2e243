"""The routes of ``/kv/v1`` of every engine: each passes its body to an operation and returns the answer.

A policy swap waits for the end of an engine's step, which on a busy machine may take longer than the engine is given to
answer. The route then asks again, for a while: a policy that is in charge already stays, so that is safe.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from engines.control.errors import EngineUnavailableError, RefusedError, StaleFenceError
from engines.control.operations import (
    BLOCKS,
    INVALIDATE,
    MIGRATE,
    PIN,
    POLICY,
    PREFIXES,
    QUOTAS,
    RESET,
    SET_POLICY,
    SET_QUOTA,
    SNAPSHOT,
    STATS,
    UNPIN,
)
from kvcontrol.core.control import SNAPSHOT_PATH, STATS_PATH
from kvcontrol.core.policy_control import POLICY_PATH
from kvcontrol.core.prefix_control import INVALIDATE_PATH, PIN_PATH, PREFIXES_PATH, UNPIN_PATH
from kvcontrol.core.tier_control import BLOCKS_PATH, MIGRATE_PATH, QUOTAS_PATH, RESET_PATH

MAX_BODY_BYTES: Final = 1 << 20
MAX_POLICY_BODY_BYTES: Final = 1 << 16
SWAP_WITHIN_S: Final = 20.0
"""For how long a swap is asked for again while the engine is busy."""
_PAUSE_S: Final = 0.1
_MOST_DIGITS: Final = 18
"""Of a number that JSON can carry; a longer one goes on as the text that it is, to be refused."""

Ask = Callable[[bytes, bytes], Awaitable[bytes]]
"""Returns the answer of an operation to a body. Raises ``RefusedError`` or ``EngineUnavailableError``."""
Handler = Callable[[Request], Awaitable[Response]]


def mount_control(app: FastAPI, ask: Ask) -> None:
    """Add the routes; ``ask`` reaches the engine."""

    async def blocks(request: Request) -> Response:
        query: dict[str, object] = dict(request.query_params)
        if "limit" in query:
            query["limit"] = whole_number(request.query_params["limit"])
        return await answered(ask, BLOCKS, msgspec.json.encode(query))

    async def swap(request: Request) -> Response:
        body = await _body(request, MAX_POLICY_BODY_BYTES)
        return _too_large(MAX_POLICY_BODY_BYTES) if body is None else await _answer_of(_swapped(ask, body))

    for path, method, handler in (
        (STATS_PATH, "GET", _without_body(ask, STATS)),
        (SNAPSHOT_PATH, "GET", _without_body(ask, SNAPSHOT)),
        (POLICY_PATH, "GET", _without_body(ask, POLICY)),
        (POLICY_PATH, "PUT", swap),
        (BLOCKS_PATH, "GET", blocks),
        (QUOTAS_PATH, "GET", _without_body(ask, QUOTAS)),
        (QUOTAS_PATH, "PUT", _with_body(ask, SET_QUOTA)),
        (MIGRATE_PATH, "POST", _with_body(ask, MIGRATE)),
        (RESET_PATH, "POST", _with_body(ask, RESET)),
        (PREFIXES_PATH, "GET", _without_body(ask, PREFIXES)),
        (PIN_PATH, "POST", _with_body(ask, PIN)),
        (UNPIN_PATH, "POST", _with_body(ask, UNPIN)),
        (INVALIDATE_PATH, "POST", _with_body(ask, INVALIDATE)),
    ):
        app.add_api_route(path, handler, methods=[method], response_model=None, tags=["kv"])


async def answered(ask: Ask, operation: bytes, body: bytes = b"") -> Response:
    """Return an operation's answer, or why there is none."""
    return await _answer_of(ask(operation, body))


def whole_number(text: str) -> int | str:
    """Return a query text as a number, or the text itself, which the operation refuses with the allowed values."""
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else text


def _without_body(ask: Ask, operation: bytes) -> Handler:
    async def handle(_: Request) -> Response:
        return await answered(ask, operation)

    return handle


def _with_body(ask: Ask, operation: bytes) -> Handler:
    async def handle(request: Request) -> Response:
        body = await _body(request, MAX_BODY_BYTES)
        return _too_large(MAX_BODY_BYTES) if body is None else await answered(ask, operation, body)

    return handle


async def _swapped(ask: Ask, body: bytes) -> bytes:
    until_s = time.monotonic() + SWAP_WITHIN_S
    while True:
        try:
            return await ask(SET_POLICY, body)
        except EngineUnavailableError:
            if time.monotonic() >= until_s:
                raise
        await asyncio.sleep(_PAUSE_S)


async def _body(request: Request, most_bytes: int) -> bytes | None:
    """Return a request's body; None for one that is longer, of which nothing more is read."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most_bytes:
            return None
    return bytes(body)


async def _answer_of(answer: Awaitable[bytes]) -> Response:
    try:
        return Response(await answer, media_type="application/json")
    except EngineUnavailableError as error:
        return _error(503, "engine_unavailable", str(error))
    except StaleFenceError as error:
        return _error(409, "stale_fence", str(error))
    except RefusedError as error:
        return _error(400, "invalid_request_error", str(error))


def _too_large(limit_bytes: int) -> Response:
    return _error(413, "request_too_large", f"the body is longer than {limit_bytes} bytes")


def _error(status: int, code: str, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": code, "param": None, "code": code}}, status_code=status)
