"""How urgent a request is, on its way from the gateway's headers to LMDeploy's scheduler.

    headers -> middleware -> ContextVar -> GenerationConfig -> (pickled to the engine process) -> SamplingParam

The way of the salt (``tenancy.py``). Time goes as a duration, as the clocks of two machines differ: it runs from the
moment at which the engine process takes the request in, a few milliseconds after the gateway sent it.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from kvcontrol.core.control import DEADLINE_HEADER, PRIORITY_HEADER
from kvcontrol.core.priority import Priority

_ATTRIBUTE = "kvgate_urgency"
_MOST_MS: Final = 86_400_000
_PRIORITIES: Final = {each.value.encode(): each for each in Priority}

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Urgency:
    """``first_token_s`` is in how long the first token is due; None: whenever."""

    priority: Priority = Priority.NORMAL
    first_token_s: float | None = None


ORDINARY: Final = Urgency()

_current: ContextVar[Urgency] = ContextVar("kvgate_urgency", default=ORDINARY)


class UrgencyError(ValueError):
    """A header is not what is allowed; the message names it, ``param`` too."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param} {message}")
        self.param = param


class UrgencyMiddleware:
    """Pure ASGI: makes the request's urgency the context's, or answers 400 in OpenAI's error envelope."""

    def __init__(self, app: _App) -> None:
        self._app = app

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            urgency = urgency_of_headers(scope["headers"])
        except UrgencyError as error:
            await _send_400(send, error)
            return
        token = _current.set(urgency)
        try:
            await self._app(scope, receive, send)
        finally:
            _current.reset(token)


def urgency_of_headers(headers: list[tuple[bytes, bytes]]) -> Urgency:
    """Return what the headers say; raises ``UrgencyError``."""
    priority = _single(headers, PRIORITY_HEADER)
    due = _single(headers, DEADLINE_HEADER)
    if priority is None and due is None:
        return ORDINARY
    if priority is not None and priority not in _PRIORITIES:
        raise UrgencyError(PRIORITY_HEADER, f"is none of {', '.join(Priority)}")
    if due is not None and not (due.isdigit() and len(due) <= len(str(_MOST_MS)) and int(due) <= _MOST_MS):
        raise UrgencyError(DEADLINE_HEADER, f"is not a whole number of milliseconds from 0 to {_MOST_MS}")
    return Urgency(
        priority=Priority.NORMAL if priority is None else _PRIORITIES[priority],
        first_token_s=None if due is None else int(due) / 1000,
    )


def carry(param: Any, urgency: Urgency) -> None:
    """Note how urgent a request is on LMDeploy's ``GenerationConfig`` or ``SamplingParam``."""
    setattr(param, _ATTRIBUTE, urgency)


def urgency_of_sequence(seq: Any) -> Urgency:
    """Return what LMDeploy's sequence was sent with."""
    urgency: Urgency = getattr(seq.sampling_param, _ATTRIBUTE, ORDINARY)
    return urgency


def _single(headers: list[tuple[bytes, bytes]], name: str) -> bytes | None:
    values = [value for key, value in headers if key.lower() == name.encode()]
    if len(values) > 1:
        raise UrgencyError(name, f"is given {len(values)} times; give it once or not at all")
    return values[0] if values else None


async def _send_400(send: _Send, error: UrgencyError) -> None:
    body = json.dumps(
        {
            "error": {
                "message": str(error),
                "type": "invalid_request_error",
                "param": error.param,
                "code": "invalid_urgency",
            }
        }
    ).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})


# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def generation_config_post_init(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """``GenerationConfig.__post_init__``, in the api_server: note how urgent the request is that is being handled."""

    def __post_init__(self: Any) -> None:  # noqa: N807  # it is called by this name
        original(self)
        if (urgency := _current.get()) is not ORDINARY:
            carry(self, urgency)

    return __post_init__


def sampling_param_from_gen_config(original: Any) -> Any:
    """``SamplingParam.from_gen_config``, in the engine process: carry it on."""
    function = original.__func__

    def from_gen_config(cls: Any, gen_config: Any) -> Any:
        param = function(cls, gen_config)
        urgency = getattr(gen_config, _ATTRIBUTE, None)
        if urgency is not None:
            carry(param, urgency)
        return param

    return classmethod(from_gen_config)


__all__ = [
    "ORDINARY",
    "Urgency",
    "UrgencyError",
    "UrgencyMiddleware",
    "carry",
    "generation_config_post_init",
    "sampling_param_from_gen_config",
    "urgency_of_headers",
    "urgency_of_sequence",
]
