"""``/kv/v1/policy`` on the api_server: bodies go to the engine process and come back as they are.

A change has to wait for the end of an engine's step, which on a busy machine may take longer than the engine process is
asked to answer in: it is asked again, for a while. That is safe, as a policy that is in charge already stays.
"""

import asyncio
import time
from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.responses import Response

from engines.lmdeploy.policy_operations import POLICY, SET_POLICY
from engines.lmdeploy.tier_routes import Answer
from kvcontrol.core.policy_control import POLICY_PATH

MAX_BODY_BYTES = 1 << 16
ASK_AGAIN_S = 20.0
_PAUSE_S = 0.1
_UNAVAILABLE = 503


def mount_policy_routes(app: FastAPI, answer: Answer, too_large: Callable[[int], Response]) -> None:
    """Add the routes; ``too_large`` answers a body of more than ``MAX_BODY_BYTES``."""

    async def show() -> Response:
        return await answer(POLICY, b"")

    async def change(request: Request) -> Response:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                return too_large(MAX_BODY_BYTES)
        until_s = time.monotonic() + ASK_AGAIN_S
        while True:
            response = await answer(SET_POLICY, body)
            if response.status_code != _UNAVAILABLE or time.monotonic() >= until_s:
                return response
            await asyncio.sleep(_PAUSE_S)

    app.add_api_route(POLICY_PATH, show, methods=["GET"], response_model=None, tags=["kv"])
    app.add_api_route(POLICY_PATH, change, methods=["PUT"], response_model=None, tags=["kv"])


__all__ = ["ASK_AGAIN_S", "MAX_BODY_BYTES", "mount_policy_routes"]
