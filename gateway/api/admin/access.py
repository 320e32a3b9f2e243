"""Access to ``/admin/v1``: the admin key, checked before the body is read.

``AdminRoute`` is the route class of every admin router: it asks for the key, reads the body within bounds of size and
time, refuses numbers that are not finite, and only then lets FastAPI look at the request.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute

from gateway.api.admin.changes import Changes
from gateway.errors import ApiError, AuthenticationError, BodyTimeoutError, BodyTooLargeError, InvalidRequestError
from gateway.http.content_encoding import coding_of, decoded
from gateway.state.budget import shared_store_time
from kvcontrol.core.finite import FINITE, non_finite

MAX_BODY_BYTES: Final = 1 << 20
_DRAINED_BYTES: Final = 16 << 20
_BODY_LIMIT_S: Final = 30.0
_MOST_PATH_CHARS: Final = 200

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class AdminAccess:
    """Knows the admin key, by its digest: comparing takes as long for a near guess as for a far one."""

    def __init__(self, key: str) -> None:
        self._digest = hashlib.sha256(key.encode()).digest()

    def check(self, authorization: str | None) -> None:
        """Raise ``AuthenticationError`` unless this header bears the admin key."""
        scheme, _, key = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise AuthenticationError(
                "no admin key; send the header Authorization: Bearer <admin key>", code="missing_admin_key"
            )
        given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        if not hmac.compare_digest(given, self._digest):
            raise AuthenticationError("this is not the admin key", code="invalid_admin_key")


class _BoundedRequest(Request):
    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            coding = coding_of(self.headers.raw)
            try:
                async with asyncio.timeout(_BODY_LIMIT_S):
                    body = await self._read()
            except TimeoutError:
                raise BodyTimeoutError(f"the request body did not arrive within {_BODY_LIMIT_S:g} s") from None
            self._body = body if coding is None else await decoded(body, coding, limit_bytes=MAX_BODY_BYTES)
        return self._body

    async def _read(self) -> bytes:
        """Read it whole. Of one that is too long the rest is thrown away, so that the client can read its answer."""
        parts: list[bytes] = []
        size = 0
        async for part in self.stream():
            size += len(part)
            if size <= MAX_BODY_BYTES:
                parts.append(part)
            elif size > _DRAINED_BYTES:
                break
        if size > MAX_BODY_BYTES:
            raise BodyTooLargeError(f"the request body is longer than {MAX_BODY_BYTES} bytes, the longest here")
        return b"".join(parts)

    async def check_numbers(self) -> None:
        """Raise ``InvalidRequestError`` for a number that is not finite; text that is no JSON is left to FastAPI."""
        try:
            path = non_finite(await self.json())
        except (ValueError, RecursionError):
            return
        if path is not None:
            shown = path[:_MOST_PATH_CHARS]
            raise InvalidRequestError(f"{shown} is no finite number; {FINITE}", param=shown)


class AdminRoute(APIRoute):
    """A route for the admin key alone. The app's state has the ``AdminAccess`` as ``admin_access``, and the ``Changes``
    as ``admin_changes``.
    """

    def check(self, request: Request) -> None:
        """Raise ``AuthenticationError`` for callers without access to this route."""
        access: AdminAccess = request.app.state.admin_access
        access.check(request.headers.get("authorization"))

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            self.check(request)
            bounded = _BoundedRequest(request.scope, request.receive)
            await bounded.body()  # here, since FastAPI would make a 400 of what goes wrong with it
            try:
                await bounded.check_numbers()
                with shared_store_time():
                    return await handle(bounded)
            except ApiError as refusal:
                changes: Changes = request.app.state.admin_changes
                if (replayed := await changes.replayed_after(refusal, bounded)) is not None:
                    return replayed
                raise

        return guarded


class RegistrationRoute(AdminRoute):
    """A route for the registration key, too. The app's state has its ``AdminAccess``, or None, as
    ``registration_access``.
    """

    def check(self, request: Request) -> None:
        registration: AdminAccess | None = request.app.state.registration_access
        try:
            super().check(request)
        except AuthenticationError:
            if registration is None:
                raise
            registration.check(request.headers.get("authorization"))
