"""What travels with a request from its headers to LMDeploy's sequence, where the scheduler finds it.

    headers -> middleware -> ContextVar -> GenerationConfig -> (pickled to the engine process) -> SamplingParam

LMDeploy has no room for it on that way, so it rides as an attribute of the two objects that go all of it.
"""

import json
from collections.abc import Awaitable, Callable, Collection, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, Generic, TypeVar, cast

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


class Rider(Generic[_Value]):
    """One thing that rides: ``read`` finds it in a request's headers (raises ``HeaderError``), ``absent`` stands for
    its absence, ``attribute`` is its name on LMDeploy's objects.
    """

    def __init__(
        self,
        attribute: str,
        *,
        absent: _Value,
        read: Callable[[Headers], _Value],
        scopes: Collection[str] = ("http",),
    ) -> None:
        self.read = read
        self.scopes = scopes
        self._attribute = attribute
        self._absent = absent
        self._current: ContextVar[_Value] = ContextVar(attribute, default=absent)

    @property
    def current(self) -> _Value:
        """What came with the request that is being handled."""
        return self._current.get()

    def of(self, carrier: Any) -> _Value:
        """Return what a ``GenerationConfig`` or ``SamplingParam`` carries."""
        return cast("_Value", getattr(carrier, self._attribute, self._absent))

    def carry(self, carrier: Any, value: _Value) -> None:
        """Put it on a ``GenerationConfig`` or ``SamplingParam``; nothing for its absence."""
        if value != self._absent:
            setattr(carrier, self._attribute, value)

    @contextmanager
    def riding(self, value: _Value) -> Iterator[None]:
        """While a request is being handled: it is the ``current`` one."""
        token = self._current.set(value)
        try:
            yield
        finally:
            self._current.reset(token)

    # What takes the place of LMDeploy's symbols (the tables are in hooks/).

    def generation_config_post_init(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        """``GenerationConfig.__post_init__``, in the api_server: it is made while the request is being handled."""
        rider = self

        def __post_init__(self: Any) -> None:  # noqa: N807  # it is called by this name
            original(self)
            rider.carry(self, rider.current)

        return __post_init__

    def sampling_param_from_gen_config(self, original: Any) -> Any:
        """``SamplingParam.from_gen_config``, in the engine process: carry it on."""
        function = original.__func__
        rider = self

        def from_gen_config(cls: Any, gen_config: Any) -> Any:
            param = function(cls, gen_config)
            rider.carry(param, rider.of(gen_config))
            return param

        return classmethod(from_gen_config)


class RiderMiddleware:
    """Pure ASGI: takes a rider out of a request's headers, or answers 400 in OpenAI's error envelope."""

    def __init__(self, app: _App, rider: Rider[Any]) -> None:
        self._app = app
        self._rider = rider

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] not in self._rider.scopes:
            await self._app(scope, receive, send)
            return
        try:
            value = self._rider.read(scope["headers"])
        except HeaderError as error:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": str(error)})
            else:
                await _send_400(send, error)
            return
        with self._rider.riding(value):
            await self._app(scope, receive, send)


def single(headers: Headers, name: str, refusal: type[HeaderError]) -> bytes | None:
    """Return a header's value, None where it is absent; raises ``refusal`` when it is given more than once."""
    values = [value for key, value in headers if key.lower() == name.encode()]
    if len(values) > 1:
        raise refusal(name, f"is given {len(values)} times; give it once or not at all")
    return values[0] if values else None


async def _send_400(send: _Send, error: HeaderError) -> None:
    said = {"message": str(error), "type": "invalid_request_error", "param": error.param, "code": error.code}
    body = json.dumps({"error": said}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})


__all__ = ["HeaderError", "Headers", "Rider", "RiderMiddleware", "single"]
