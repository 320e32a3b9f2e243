"""What a request's headers contain for the engine, from the middleware to the code that handles the request."""

import json
from collections.abc import Awaitable, Callable, Collection, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, Generic, TypeVar

Headers = list[tuple[bytes, bytes]]
_Value = TypeVar("_Value")
_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]


class HeaderError(ValueError):
    """A header is not what is allowed; the message names it, ``param`` too. ``code`` is the OpenAI envelope's."""

    code: ClassVar[str]

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param} {message}")
        self.param = param


class HeaderValue(Generic[_Value]):
    """One value of a request's headers: ``read`` finds it there (raises ``HeaderError``), ``absent`` stands for its
    absence. ``scopes`` are the ASGI scopes that it is read in.
    """

    def __init__(
        self,
        name: str,
        *,
        absent: _Value,
        read: Callable[[Headers], _Value],
        scopes: Collection[str] = ("http",),
    ) -> None:
        self.absent = absent
        self.read = read
        self.scopes = scopes
        self._current: ContextVar[_Value] = ContextVar(name, default=absent)

    @property
    def current(self) -> _Value:
        """The value of the request that is being handled."""
        return self._current.get()

    @contextmanager
    def handling(self, value: _Value) -> Iterator[None]:
        """Let ``value`` be the ``current`` one while a request is being handled."""
        token = self._current.set(value)
        try:
            yield
        finally:
            self._current.reset(token)


class HeaderMiddleware:
    """Pure ASGI: reads a value out of a request's headers, or answers 400 in OpenAI's error envelope."""

    def __init__(self, app: _App, header: HeaderValue[Any]) -> None:
        self._app = app
        self._header = header

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] not in self._header.scopes:
            await self._app(scope, receive, send)
            return
        try:
            value = self._header.read(scope["headers"])
        except HeaderError as error:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": str(error)})
            else:
                await _send_400(send, error)
            return
        with self._header.handling(value):
            await self._app(scope, receive, send)


def single(headers: Headers, name: str, refusal: type[HeaderError]) -> bytes | None:
    """Return a header's value, None where it is absent; raises ``refusal`` when it is given more than once."""
    values = [value for key, value in headers if key.lower() == name.encode()]
    if len(values) > 1:
        raise refusal(name, f"is given {len(values)} times; give it once or not at all")
    return values[0] if values else None


async def _send_400(send: _Send, error: HeaderError) -> None:
    error_body = {"message": str(error), "type": "invalid_request_error", "param": error.param, "code": error.code}
    body = json.dumps({"error": error_body}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
