"""``/kv/v1`` of a simulated instance, and how a refusal is said."""

from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from engines.events.publisher import RefusedError
from engines.sim.instance import SimInstance
from kvcontrol.core.control import SNAPSHOT_PATH, STATS_PATH
from kvcontrol.core.policy_control import POLICY_PATH
from kvcontrol.core.prefix_control import INVALIDATE_PATH, PIN_PATH, PREFIXES_PATH, UNPIN_PATH
from kvcontrol.core.tier_control import BLOCKS_PATH, MIGRATE_PATH, QUOTAS_PATH, RESET_PATH

MOST_BODY_BYTES: Final = 64 << 20


class RefusedRequestError(Exception):
    """Becomes an answer in OpenAI's envelope, or in a dialect's; ``param`` is the field that is refused."""

    def __init__(
        self, status: HTTPStatus, message: str, code: str = "invalid_request_error", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def answer(self) -> Response:
        """Return the answer."""
        error = {"message": str(self), "type": self.code, "param": self.param, "code": self.code}
        return JSONResponse({"error": error}, status_code=self.status)


def mount_control(app: FastAPI, instance: SimInstance) -> None:  # noqa: C901 - one line a route
    """Add the routes."""

    async def stats(_: Request) -> object:
        return await instance.stats()

    async def snapshot(_: Request) -> object:
        return await instance.snapshot()

    async def blocks(request: Request) -> object:
        return instance.blocks(dict(request.query_params))

    async def show_quotas(_: Request) -> object:
        return instance.quotas()

    async def set_quota(request: Request) -> object:
        return instance.set_quota(await read_body(request))

    async def migrate(request: Request) -> object:
        return instance.migrate(await read_body(request))

    async def reset(_: Request) -> object:
        return instance.reset()

    async def prefixes(_: Request) -> object:
        return instance.pins.report()

    async def pin(request: Request) -> object:
        return instance.pin(await read_body(request))

    async def unpin(request: Request) -> object:
        return instance.unpin(await read_body(request))

    async def invalidate(request: Request) -> object:
        return instance.invalidate(await read_body(request))

    async def policy(_: Request) -> object:
        return instance.policies.report()

    async def set_policy(request: Request) -> object:
        return instance.policies.change(await read_body(request))

    for path, method, control in (
        (STATS_PATH, "GET", stats),
        (SNAPSHOT_PATH, "GET", snapshot),
        (BLOCKS_PATH, "GET", blocks),
        (QUOTAS_PATH, "GET", show_quotas),
        (QUOTAS_PATH, "PUT", set_quota),
        (MIGRATE_PATH, "POST", migrate),
        (RESET_PATH, "POST", reset),
        (PREFIXES_PATH, "GET", prefixes),
        (PIN_PATH, "POST", pin),
        (UNPIN_PATH, "POST", unpin),
        (INVALIDATE_PATH, "POST", invalidate),
        (POLICY_PATH, "GET", policy),
        (POLICY_PATH, "PUT", set_policy),
    ):
        app.add_api_route(path, _controlled(control), methods=[method], response_model=None)


async def read_body(request: Request) -> bytes:
    """Return a request's body; raises ``RefusedRequestError`` for one that is too long."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BODY_BYTES:
            raise RefusedRequestError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is longer than {MOST_BODY_BYTES} bytes"
            )
    return bytes(body)


def _controlled(handler: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """Answer with a control body, or with why not."""

    async def handle(request: Request) -> Response:
        try:
            return Response(msgspec.json.encode(await handler(request)), media_type="application/json")
        except RefusedError as error:
            return RefusedRequestError(HTTPStatus.BAD_REQUEST, str(error)).answer()
        except TimeoutError:
            message = "the event publisher did not answer in time"
            return RefusedRequestError(HTTPStatus.SERVICE_UNAVAILABLE, message, "engine_unavailable").answer()
        except RefusedRequestError as refusal:
            return refusal.answer()

    return handle


__all__ = ["MOST_BODY_BYTES", "RefusedRequestError", "mount_control", "read_body"]
