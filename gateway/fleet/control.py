"""One call to one instance's ``/kv/v1``, bounded in time and size; a refusal has the instance's message."""

import asyncio
from http import HTTPStatus
from typing import Any, Final

import httpx2
import msgspec

from gateway.http.client import FETCH_ERRORS, fetch
from gateway.http.connect_failure import connect_failure_reason
from gateway.registry import Instance
from kvcontrol.core.errors import UNREADABLE

_MAX_ANSWER_BYTES: Final = 4 << 20
_MAX_SHOWN: Final = 300
_BUSY_PAUSE_S: Final = 0.25


class InstanceControlError(Exception):
    """An instance refused, or can't be reached. ``sure``: nothing was changed there."""

    def __init__(self, message: str, *, status: int | None, sure: bool) -> None:
        super().__init__(message)
        self.status = status
        self.sure = sure

    @property
    def silent(self) -> bool:
        """Whether the instance gave no answer, though it may have received the call."""
        return self.status is None and not self.sure


class _DroppedError(InstanceControlError):
    """The connection ended before there was an answer."""


class InstanceControl:
    """Talks JSON to instances; each call takes at most ``timeout_s``."""

    def __init__(self, client: httpx2.AsyncClient, *, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s

    @property
    def timeout_s(self) -> float:
        """The longest time of a call."""
        return self._timeout_s

    async def call(self, instance: Instance, method: str, path: str, body: Any = None) -> bytes:
        """Return an instance's answer; raises ``InstanceControlError`` for anything but a success.

        A 503 comes from a busy engine: the call is repeated until the time is over. All calls of ``/kv/v1`` are
        idempotent.
        """
        busy: InstanceControlError | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    try:
                        return await self._once(instance, method, path, body)
                    except InstanceControlError as error:
                        if error.status != HTTPStatus.SERVICE_UNAVAILABLE:
                            raise
                        busy = error
                    await asyncio.sleep(_BUSY_PAUSE_S)
        except TimeoutError:
            raise busy or InstanceControlError(
                f"no answer to {path} within {self._timeout_s:g} s", status=None, sure=False
            ) from None

    async def _once(self, instance: Instance, method: str, path: str, body: Any) -> bytes:
        """Send once, and again if a pooled connection was dead."""
        try:
            return await self._sent(instance, method, path, body)
        except _DroppedError as dropped:
            try:
                return await self._sent(instance, method, path, body)
            except InstanceControlError as error:
                if error.status is None:  # the instance may have received the first one
                    raise InstanceControlError(f"{path}: {dropped}; {error}", status=None, sure=False) from None
                raise

    async def _sent(self, instance: Instance, method: str, path: str, body: Any) -> bytes:
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if data is None else {"content-type": "application/json"}
        try:
            status, reply = await fetch(
                self._client,
                method,
                instance.url + path,
                limit_bytes=_MAX_ANSWER_BYTES,
                content=data,
                headers=headers,
            )
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise InstanceControlError(
                f"can't be reached: {connect_failure_reason(error)}", status=None, sure=True
            ) from None
        except (httpx2.NetworkError, httpx2.RemoteProtocolError) as error:
            raise _DroppedError(str(error) or type(error).__name__, status=None, sure=False) from None
        except FETCH_ERRORS as error:
            if isinstance(error, TimeoutError):
                raise
            raise InstanceControlError(f"{path}: {error or type(error).__name__}", status=None, sure=False) from None
        if status >= HTTPStatus.MULTIPLE_CHOICES:
            refused = HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR
            raise InstanceControlError(_message(status, path, reply), status=status, sure=refused)
        return reply


def _message(status: int, path: str, reply: bytes) -> str:
    try:
        match msgspec.json.decode(reply):
            case {"error": {"message": str(message)}}:
                return message[:_MAX_SHOWN]
    except UNREADABLE:
        pass
    return f"{path} answered {status}"
