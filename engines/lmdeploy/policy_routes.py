"""``/kv/v1/policy`` on the api_server: bodies go to the engine process and come back as they are."""

from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.responses import Response

from engines.lmdeploy.policy_operations import POLICY, SET_POLICY
from engines.lmdeploy.tier_routes import Answer
from kvcontrol.core.policy_control import POLICY_PATH

MAX_BODY_BYTES = 1 << 16


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
        return await answer(SET_POLICY, body)

    app.add_api_route(POLICY_PATH, show, methods=["GET"], response_model=None, tags=["kv"])
    app.add_api_route(POLICY_PATH, change, methods=["PUT"], response_model=None, tags=["kv"])


__all__ = ["MAX_BODY_BYTES", "mount_policy_routes"]
